"""The engine as a model of EleutherAI's lm-evaluation-harness, in process.

    python -m snapstream.integrations.lm_eval run --model snapstream --model_args pretrained=DIR,budget=8192 --tasks ...

Invariant: nothing is truncated silently. A prompt that does not fit is an error, or with ``too_long=middle`` loses its
middle, which is logged. Log-likelihoods come from the uncompressed prefill, so a budget changes only what is
*generated*; tasks that read likelihoods measure the model, not the cache.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from snapstream.llm import LLM
from snapstream.models.chat_template import render_chat
from snapstream.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger(__name__)

# Generation settings of a task: those with the same name in the engine, and those without effect.
_SAMPLING = frozenset(("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
                       "frequency_penalty", "min_tokens"))  # fmt: skip
_IGNORED = frozenset(("do_sample", "until", "max_gen_toks"))  # read by name
_BATCH = 256  # requests per call of the engine, after which the bar moves and the harness's cache grows
_TokenPair = tuple[tuple[str, str], list[int], list[int]]  # texts (for the harness's cache), context, continuation


@register_model("snapstream")
class SnapstreamLM(TemplateLM):
    """``pretrained``: a checkpoint folder. ``settings``: fields of ``EngineOptions``; the budget is "full" by default.

    ``too_long``: "refuse" or "middle" (what LongBench does: the prompt's middle is cut until it fits). The harness's
    batch sizes have no effect: the engine fills its ``max_rows`` from a queue. Raises ValueError for
    anything that the engine does not take.
    """

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        max_gen_toks: int = 256,
        too_long: str = "refuse",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if too_long not in ("refuse", "middle"):
            raise ValueError(f"too_long is {too_long!r}; it must be 'refuse' or 'middle'")
        settings = {"budget": "full", "device": device or "cpu", **settings}
        self._llm = LLM(pretrained, progress=False, **settings)
        self._lora = self._llm.config.only_lora
        if self._llm.tokenizer is None:
            raise ValueError(f"{pretrained} has no tokenizer; the harness sends text")
        self.tokenizer = self._llm.tokenizer
        self.batch_size = batch_size  # the harness prints it
        self.max_gen_toks = max_gen_toks
        self._too_long = too_long
        self._name = pretrained

    @property
    def max_length(self) -> int:
        """Prompt and output together, in tokens."""
        return self._llm.config.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        ends = self._llm.model_config.eos_token_ids
        if not ends:
            raise ValueError("this checkpoint names no end token, which the harness puts before an empty context")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the beginning token, or else the end token."""
        begin = self._llm.model_config.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Token ids; a text that already begins with the beginning token gets no second one."""
        begin = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None:
            add_special_tokens = not (begin and string.startswith(begin))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the task's stop strings, in the order of ``requests``."""
        texts: list[str] = []
        for batch in self._batches(requests, disable_tqdm):
            params = [self._params(request.args[1]) for request in batch]
            prompts = [
                self._fitted(self.tok_encode(request.args[0]), own.max_tokens)
                for request, own in zip(batch, params, strict=True)
            ]
            outputs = self._llm.generate(prompts, params, lora=self._lora)
            for request, output in zip(batch, outputs, strict=True):
                texts.append(output.text)
                self.cache_hook.add_partial("generate_until", request.args, output.text)
        return texts

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts; those beyond max_model_len in pieces that do not overlap."""
        totals: list[float] = []
        for request in requests:
            (text,) = request.args
            pieces = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_length - 2, 1
            )
            pairs = [(("", text), *make_disjoint_window(piece)) for piece in pieces]
            scored = self._loglikelihood_tokens(pairs, disable_tqdm=True)
            totals.append(sum(value for value, _ in scored))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def _loglikelihood_tokens(
        self, requests: list[_TokenPair], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """Per pair: log-likelihood of the continuation, and whether it is what greedy decoding would give."""
        results: list[tuple[float, bool]] = []
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
        for batch in self._batches(requests, disable_tqdm):
            prompts = []
            for _, context, continuation in batch:
                prompts.append([*self._fitted(context, len(continuation) + params.max_tokens), *continuation])
            outputs = self._llm.generate(prompts, params, lora=self._lora)
            for (texts, _, continuation), output in zip(batch, outputs, strict=True):
                results.append(_score(output, len(continuation)))
                if texts[0]:
                    self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def _params(self, settings: dict[str, Any]) -> SamplingParams:
        """A task's ``generation_kwargs``; ValueError for a setting that would change the result and is not known."""
        given = normalize_gen_kwargs(settings, self.max_gen_toks)
        unknown = set(given) - _SAMPLING - _IGNORED
        if unknown:
            raise ValueError(f"generation settings {sorted(unknown)} are not known to this engine")
        # Empty stop strings, which some tasks have, stop nothing.
        until = [text for text in given["until"] if text]
        own = {"temperature": 0.0, **{name: value for name, value in given.items() if name in _SAMPLING}}
        return SamplingParams(max_tokens=given["max_gen_toks"], stop=until, **own)

    def _fitted(self, ids: list[int], reserved: int) -> list[int]:
        """``ids`` if they fit with ``reserved`` tokens; else as ``too_long`` says."""
        room = self.max_length - reserved
        if len(ids) <= room:
            return ids
        if self._too_long == "refuse" or room < 2:
            raise ValueError(
                f"a prompt has {len(ids)} tokens; max_model_len {self.max_length} leaves {room} besides the output "
                f"({reserved}). too_long=middle would truncate it"
            )
        log.warning("a prompt of %d tokens lost its middle to fit %d", len(ids), room)
        head = room // 2
        return [*ids[:head], *ids[len(ids) - (room - head) :]]

    def _batches(self, requests: Sequence[Any], is_quiet: bool) -> Iterator[Sequence[Any]]:
        from tqdm import tqdm

        with tqdm(total=len(requests), disable=is_quiet or len(requests) < 2) as bar:
            for start in range(0, len(requests), _BATCH):
                batch = requests[start : start + _BATCH]
                yield batch
                bar.update(len(batch))


def _score(output: RequestOutput, num_tokens: int) -> tuple[float, bool]:
    """Sum over the last ``num_tokens`` prompt tokens, and whether each was the likeliest."""
    assert output.prompt_logprobs is not None
    own = output.prompt_logprobs[len(output.prompt_logprobs) - num_tokens :]
    known = [entry for entry in own if entry is not None]
    if len(known) < len(own):
        raise ValueError("the first token of a prompt has no log-probability; give it a context")
    return math.fsum(entry.logprob for entry in known), all(entry.logprob >= entry.top[0][1] for entry in known)


def main() -> None:
    """lm-eval's command line, with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
