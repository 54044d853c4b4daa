"""Per-head KV budgets: which kv heads of a model need slots, measured once per checkpoint (``config/kv.py``).

A checkpoint and texts in, a profile of its kv heads out. Texts are generated documents with a question each, whose
answers show which heads look things up, or windows of the user's text, each followed by its own continuation.

``automatic_heads`` finds or makes one without being asked. Known are the profile in the folder of the weights
(``heads.json``; the shipped models have one) and the one kept in the user's cache folder by the checkpoint's
fingerprint, where ``snapstream calibrate`` writes it too. Without either the model is calibrated, if that takes at most
``LIMIT_S``; how long it would take otherwise is kept, so that the next start need not find out. Invariant: no engine is
refused or fails for it; wherever per-head budgets are not supported or would cost too long a start, all heads are equal
and a line says why.

A head's share of the slots grows with the root of what the model loses without it: in proportion to the loss itself,
heads that matter a little would get nothing, and what needs them fails first (docs/research/accuracy.md has both).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from snapstream.assets.documents import Style, make_document
from snapstream.config import DEFAULT_SINK, DType, EngineConfig, EngineOptions, ModelConfig, as_count
from snapstream.config.kv import HeadProfile, Shares, read_profile
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.cpu.looped.build import cache_root
from snapstream.kernels.interface import CosSin, HeadNorm
from snapstream.kernels.pytorch import capped_, sink_softmax
from snapstream.models.chat_template import render_chat
from snapstream.models.config_json import fingerprint
from snapstream.models.decoder import Decoder
from snapstream.models.layers import Recurrence, RowsRecurrence
from snapstream.models.prefill import LayerPass, PassTokens
from snapstream.models.registry import kv_spec_of, read_model_config
from snapstream.models.sharding import layer_parameters, weight_bytes
from snapstream.models.tokenizer import find_tokenizer
from snapstream.plan.fit import why_no_heads, with_speculator
from snapstream.startup.build import build_runner
from snapstream.startup.measure import decide

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FAMILIES = ("variable", "multi_number", "multi_uuid", "paraphrase", "kv")  # in turn
CONTINUATION = 64  # tokens of a text that count after each window
TEMPLATE_TOKENS = 48  # room for a chat template and a question
QUESTION_TOKENS = 40  # of these the question's, where a template takes more
Text = tuple[list[int], list[int]]  # tokens of a prompt, and of what follows


def generated(tokenizer: PreTrainedTokenizerBase, prompt_len: int, count: int) -> Iterator[Text]:
    """``count`` documents of at most ``prompt_len`` tokens, of the split that the evals do not ask about.

    ValueError for a chat template that leaves them less than half of the prompt.
    """
    encode = _encoder(tokenizer)
    around = max(len(encode(_as_prompt(tokenizer, ""))) + QUESTION_TOKENS, TEMPLATE_TOKENS)
    if around > prompt_len // 2:
        raise ValueError(
            f"prompt_len is {prompt_len}; the chat template and a question take up to {around} of these tokens, and "
            "half of them are for a document"
        )
    for index in range(count):
        document = make_document(
            family=FAMILIES[index % len(FAMILIES)],
            seed=f"calibrate/{index}",
            count_tokens=lambda text: len(encode(text)),
            target_tokens=prompt_len - around,
            num_questions=1,
            style=Style(split="train"),
        )
        question = document.questions[0]
        yield encode(_as_prompt(tokenizer, document.prompt(question))), encode(question.answer)


def _as_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """By the chat template, or without one as a paragraph."""
    if tokenizer.chat_template is None:
        return f"{text}\n\n"
    return render_chat(tokenizer, [{"role": "user", "content": text}])


def windows(tokenizer: PreTrainedTokenizerBase, text: str, prompt_len: int, count: int) -> Iterator[Text]:
    """``count`` windows of ``prompt_len`` tokens, evenly spaced, fewer where the text has fewer; they do not overlap.

    ValueError for a text that is shorter than a window and its continuation.
    """
    ids = _encoder(tokenizer)(text)
    whole = prompt_len + CONTINUATION
    if len(ids) < whole:
        raise ValueError(f"the text has {len(ids)} tokens; a window and what follows it take {whole}")
    count = min(count, len(ids) // whole)
    for index in range(count):
        start = (len(ids) - whole) * index // max(count - 1, 1)
        yield ids[start : start + prompt_len], ids[start + prompt_len : start + whole]


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class Ablation:
    """What a model loses when one kv head forgets the middle of a prompt: every head in turn, on one prefill.

    Heads are those of the layers to which a budget applies; layers with windows or states see all that the model does.
    A ``KVView`` of one new token for each copy of the prompt. Invariant: copies differ in nothing but what one head
    sees. Copy 0 sees everything; copy ``i`` is that without the candidates of head ``i - 1``, counted
    layer by layer: of these the head keeps sinks and recent tokens. All copies share the prompt's keys and values; each
    has its own of the tokens that are fed later.
    """

    def __init__(self, runner: ModelRunner, token_ids: Sequence[int], num_sink: int, num_recent: int) -> None:
        """Reads the prompt through the runner's own buffers; nothing else may run on it."""
        self._decoder, device = runner.decoder, runner.decoder.device
        self._hidden = slice(num_sink, max(num_sink, len(token_ids) - num_recent))  # what a head forgets
        self._num_tokens = len(token_ids)
        full = self._decoder.kv_spec().budget_layers
        self._places = {layer: place for place, layer in enumerate(full)}
        self._prompt: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: keys and values [G, N, E], fp32
        self._later: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer and token: k and v [B, G, E], fp32
        self._states = _States(self._decoder)
        tokens = PassTokens(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.arange(len(token_ids), device=device),
            seq_lens=torch.full((len(token_ids),), len(token_ids), device=device),
            prompt_lens=[len(token_ids)],
            num_queries=[0],
        )
        chunk_len = runner.config.chunking.chunk_len
        reading = LayerPass(
            runner.decoder, runner.buffers, tokens, chunk_len, runner.prefill_attention, self._layer_done, "none",
            self._states,
        )  # fmt: skip
        reading.run()
        self._states.copy(self.num_copies)

    @property
    def num_copies(self) -> int:
        return 1 + len(self._places) * self._decoder.config.num_kv_heads

    def feed(self, token: int) -> Tensor:
        """The same token for every copy: log-probabilities of the next, ``[B, V]`` fp32."""
        ids = torch.full((self.num_copies,), token, device=self._decoder.device)
        positions = torch.full_like(ids, self._num_tokens)
        rope = self._decoder.rope(positions, positions + 1)
        self._num_tokens += 1
        return self._decoder.run(ids, rope, self).log_softmax(-1)

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """``heads [B, H+2G, E]`` -> ``[B, H, E]``: attention over the prompt, and over what was fed since."""
        assert rope is not None, "a model of latents has one kv head"
        groups = self._decoder.config.num_kv_heads
        qk = self._decoder.kernels.norm_rope(heads, norm, rope, groups)  # [B, H+G, E]
        self._later[layer].append((qk[:, -groups:].float(), heads[:, -groups:].float()))
        keys, values = self._prompt[layer]
        own_keys, own_values = (torch.stack(each, dim=2) for each in zip(*self._later[layer], strict=True))
        q = qk[:, :-groups].float().unflatten(1, (groups, -1)) * qk.shape[-1] ** -0.5  # [B, G, r, E]
        num_before, place = keys.shape[1], self._places.get(layer)
        window = self._decoder.config.layer_windows[layer]
        unseen = 0 if window is None else max(self._num_tokens - window, 0)  # first tokens, behind the window
        if window is not None and self._decoder.config.has_chunks:
            unseen = (self._num_tokens - 1) // window * window
        out = torch.empty_like(q)
        for head in range(groups):
            before = capped_(q[:, head] @ keys[head].T, norm.cap)  # [B, r, N]
            since = capped_(q[:, head] @ own_keys[:, head].transpose(1, 2), norm.cap)  # [B, r, t]
            before[..., :unseen] = float("-inf")
            since[..., : max(unseen - num_before, 0)] = float("-inf")
            if place is not None:
                before[1 + place * groups + head, :, self._hidden] = float("-inf")
            own_sinks = None if norm.sinks is None else norm.sinks.view(groups, -1, 1)[head]
            weights = sink_softmax(torch.cat([before, since], dim=-1), own_sinks)
            out[:, head] = weights[..., :num_before] @ values[head] + weights[..., num_before:] @ own_values[:, head]
        return out.flatten(1, 2).to(heads.dtype)

    def recur(
        self, layer: int, inputs: Tensor, recurrence: Recurrence, of_rows: RowsRecurrence | None = None
    ) -> Tensor:
        """One token per copy."""
        return recurrence(inputs[:, None], self._states.of(0, layer))[:, 0]

    def outputs(self, x: Tensor) -> Tensor:
        return x

    def _layer_done(self, prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor) -> None:
        self._prompt[layer] = keys.float().clone(), values.float().clone()
        self._later[layer] = []


class _States:
    """``PromptStates`` of one prompt, then of its copies."""

    def __init__(self, decoder: Decoder) -> None:
        spec = decoder.kv_spec()
        self._states = {
            layer: {name: torch.zeros(shape, device=decoder.device) for name, shape in spec.state_shapes(layer)}
            for layer in range(spec.num_layers)
        }

    def copy(self, count: int) -> None:
        """Give each of so many copies the state."""
        for own in self._states.values():
            for name, tensor in own.items():
                own[name] = tensor.expand(count, *tensor.shape).clone()  # [B, ...]

    def of(self, prompt: int, layer: int) -> Mapping[str, Tensor]:
        return self._states[layer]

    def begin(self, prompt: int, layer: int) -> None:
        """Zeros, as made."""

    def ends(self, prompt: int) -> Sequence[int]:
        return ()

    def reached(self, prompt: int, layer: int, num_tokens: int) -> None:
        """Not asked for."""

    def done(self, prompt: int, layer: int) -> None:
        """Nothing to do."""


@torch.inference_mode()
def damage(
    runner: ModelRunner, prompt: Sequence[int], answer: Sequence[int], num_sink: int, num_recent: int
) -> tuple[Tensor, int]:
    """KL divergence of the model's distributions over an answer without each head: nats, summed over its tokens.

    Returns ``[L', G]`` fp32, of the layers to which a budget applies, and the number of tokens that count. The answer
    is teacher-forced; its first token comes from the prompt's prefill and does not count, so it needs at least two
    tokens.
    """
    if len(answer) < 2:
        raise ValueError(f"an answer of {len(answer)} tokens; the first comes out of the prefill and does not count")
    copies = Ablation(runner, prompt, num_sink, num_recent)
    total = torch.zeros(copies.num_copies - 1)
    for token in answer[:-1]:
        logs = copies.feed(token)
        total += (logs[0].exp() * (logs[0] - logs[1:])).sum(-1).cpu()
    return total.view(-1, runner.decoder.config.num_kv_heads), len(answer) - 1


RING_PART = 16  # of a prompt stays as the ring of a head that forgets: that of a row of a quarter
LEAST_PROMPT = 256  # tokens
_LEAST_DAMAGE = 1e-6  # nats; so that no share is 0


class TooSlow(Exception):
    """Calibration would take longer than its limit; ``seconds`` is how long the shortest one would."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"calibration would take {seconds:.0f} s")
        self.seconds = seconds


def calibrate(
    model: Path,
    *,
    text: str | None = None,
    prompt_len: int = 2048,
    num_texts: int = 20,
    dtype: DType = "float32",
    device: str = "cpu",
    progress: bool = True,
    limit_s: float | None = None,
) -> HeadProfile:
    """Measure on ``num_texts`` generated documents, or windows of ``text``, of ``prompt_len`` tokens.

    With ``limit_s`` on as many as the seconds allow, by the time that the first takes; ``TooSlow`` where they are fewer
    than one of each kind. ValueError for a model whose heads cannot have budgets of their own, and for texts that are
    too short.
    """
    as_count("prompt_len", prompt_len, LEAST_PROMPT)
    as_count("num_texts", num_texts, len(FAMILIES) if text is None else 1)
    config = read_model_config(model)
    if (problem := why_no_heads(config)) is not None:
        raise ValueError(problem)
    tokenizer = find_tokenizer(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer; calibration reads text")
    options = EngineOptions(
        budget="full", max_rows=1, max_model_len=prompt_len + 2 * CONTINUATION, dtype=dtype, device=device,
        executor="eager",
    )  # fmt: skip
    found: Iterable[Text] = (
        generated(tokenizer, prompt_len, num_texts) if text is None else windows(tokenizer, text, prompt_len, num_texts)
    )
    runner = build_runner(model, config, decide(config, options), None, False)
    losses, num_tokens, num_read = _measure(runner, found, num_texts, prompt_len, progress, limit_s)
    what = "generated documents" if text is None else "windows of a text"
    return HeadProfile(
        shares=shares_of(losses),
        model=fingerprint(model),
        made_by=f"{num_read} {what} of {prompt_len} tokens, {num_tokens} tokens of answers, dtype {dtype}",
    )


def _measure(
    runner: ModelRunner,
    texts: Iterable[Text],
    num_texts: int,
    prompt_len: int,
    progress: bool,
    limit_s: float | None,
) -> tuple[Tensor, int, int]:
    """Losses per token of an answer ``[L', G]``, how many tokens there were, and of how many texts."""
    from tqdm import tqdm

    num_layers, num_heads = len(runner.decoder.kv_spec().budget_layers), runner.decoder.config.num_kv_heads
    losses, count, num_read = torch.zeros(num_layers, num_heads), 0, 0
    began = perf_counter()
    with tqdm(total=num_texts, desc="Calibrating", disable=not progress, file=sys.stderr) as bar:
        for prompt, answer in texts:
            own, num = damage(runner, prompt, answer, DEFAULT_SINK, prompt_len // RING_PART)
            losses, count, num_read = losses + own, count + num, num_read + 1
            if num_read == 1 and limit_s is not None:
                seconds = perf_counter() - began
                if seconds * len(FAMILIES) > limit_s:
                    raise TooSlow(seconds * len(FAMILIES))
                num_texts = bar.total = min(num_texts, int(limit_s / seconds))
            bar.update()
            if num_read == num_texts:
                break
    return losses / count, count, num_read


def shares_of(losses: Tensor) -> Shares:
    """Shares by layer and kv head of losses ``[L', G]``; ValueError for losses that are not finite."""
    if not losses.isfinite().all():
        raise ValueError("the model's log-probabilities are not finite; it cannot be calibrated in this dtype")
    roots = losses.double().clamp(min=_LEAST_DAMAGE).sqrt()
    return tuple(tuple(layer) for layer in (roots / roots.sum()).tolist())


FILE = "heads.json"  # in the folder of the weights
LIMIT_S = 60.0  # that a start may spend on calibration
PROMPT_LEN = 2048  # tokens of its documents
THREAD_FLOPS = 5e10  # that a CPU thread does a second, about: a large model is refused before it is loaded
READ_RATE = 1e9  # bytes of weights a second, about, which calibration reads once more than the engine
ANSWER_LEN = 16  # tokens of a generated answer, about


def stored_profile(folder: Path) -> HeadProfile | None:
    """The profile of a checkpoint that is known already. A file of other weights or with damage counts as none."""
    own = fingerprint(folder)
    for path in ((folder if folder.is_dir() else folder.parent) / FILE, cached(own)):
        try:
            found = read_profile(path)
        except ValueError:
            continue
        if found.model == own:
            return found
    return None


def cached(own: str) -> Path:
    """Where the profile of a checkpoint of that fingerprint is kept."""
    return cache_root() / "heads" / f"{own}.json"


def store_profile(profile: HeadProfile) -> Path:
    """Keep a profile for the next start, whole or not at all. OSError where that cannot be written."""
    path = cached(profile.model)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    profile.write(part)
    part.replace(path)
    return path


def _seconds_file(own: str, device: str) -> Path:
    """What the shortest calibration would take, where a start has found that to be too long: with as many threads."""
    where = f"cpu-{torch.get_num_threads()}" if device == "cpu" else device.partition(":")[0]
    return cached(own).with_suffix(f".{where}.seconds")


def _known_seconds(own: str, device: str) -> float:
    try:
        return float(_seconds_file(own, device).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0


def _keep_seconds(own: str, device: str, seconds: float) -> None:
    path = _seconds_file(own, device)
    with suppress(OSError):  # the next start finds out again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"{seconds:.1f}", encoding="utf-8")


def automatic_heads(
    folder: Path,
    model: ModelConfig,
    options: EngineOptions,
    *,
    progress: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> tuple[EngineOptions, str]:
    """The options with their heads, and a line that says which, empty where unasked and rows keep every token.

    ``on_stage`` hears of a wait. ValueError for options that no engine could have, whatever its heads.
    """
    options = with_speculator(options, (folder, model))
    equal = replace(options, heads="none")
    config = decide(model, equal)
    if config.budget.num_topk == 0 or config.budget.capacity >= config.max_model_len:
        return equal, "" if options.heads is None else "heads: equal, because rows keep every token or select none"
    if (problem := _why_equal(model, options, config)) is not None:
        return equal, f"heads: equal, because {problem}"
    profile, how = stored_profile(folder), ""
    if profile is None:
        least = max(least_seconds(model, config), _known_seconds(fingerprint(folder), config.device))
        if least > LIMIT_S:
            return equal, _too_slow(folder, least)
        prompt_len = min(PROMPT_LEN, model.max_position - PROMPT_LEN // 16)
        profile, how = _calibrated(folder, options, prompt_len, progress, on_stage)
    if profile is None:
        return equal, how
    return replace(options, heads=profile), f"heads: per-head budgets from {profile.made_by}{how} (--heads none: equal)"


def _why_equal(model: ModelConfig, options: EngineOptions, config: EngineConfig) -> str | None:
    """Why this engine cannot have per-head budgets; None if it can."""
    if config.parallel.ranks_here < config.parallel.size:
        return "ranks on other machines may have other profiles"
    layers, heads = max(_num_layers(model), 1), model.num_kv_heads
    shares = ((1 / (layers * heads),) * heads,) * layers
    try:
        decide(model, replace(options, heads=HeadProfile(shares=shares, model="")))
    except ValueError as error:
        return str(error).removeprefix("heads: ")
    return None


def _num_layers(model: ModelConfig) -> int:
    """Layers to which a budget applies."""
    return len(kv_spec_of(model, "float32").budget_layers)


def least_seconds(model: ModelConfig, config: EngineConfig) -> float:
    """What the shortest calibration takes, about; on a GPU only the reading of weights, the first document tells."""
    reading = weight_bytes(model, config.dtype, config.weights) / READ_RATE
    if config.device != "cpu":
        return reading
    copies = 1 + _num_layers(model) * model.num_kv_heads
    tokens = len(FAMILIES) * (PROMPT_LEN + copies * ANSWER_LEN)
    products = 2.0 * layer_parameters(model) * model.num_layers * tokens
    return reading + products / (torch.get_num_threads() * THREAD_FLOPS)


def _calibrated(
    folder: Path, options: EngineOptions, prompt_len: int, progress: bool, on_stage: Callable[[str], None]
) -> tuple[HeadProfile | None, str]:
    """A profile measured now and kept, and what to add to the line; None and the whole line where there is none."""
    on_stage(f"calibrating kv heads, at most {LIMIT_S:.0f} s; --heads none skips it")
    try:
        found = calibrate(
            folder, prompt_len=prompt_len, dtype=options.dtype, device=options.device, progress=progress,
            limit_s=LIMIT_S,
        )  # fmt: skip
    except TooSlow as error:
        _keep_seconds(fingerprint(folder), options.device, error.seconds)
        return None, _too_slow(folder, error.seconds)
    except (ValueError, OSError, RuntimeError) as error:  # no tokenizer, a context without room, memory of a GPU
        why = str(error).partition("\n")[0]
        return None, f"heads: equal, because the model cannot be calibrated: {why}"
    finally:
        _release(options.device)
    try:
        return found, f", kept in {store_profile(found)}"
    except OSError as error:
        return found, f", not kept: {error}"


def _release(device: str) -> None:
    """Give the memory of the calibrated model back before what is free is measured for the engine."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _too_slow(folder: Path, seconds: float) -> str:
    return (
        f"heads: equal; calibration would take {seconds:,.0f} s or more, and a start waits at most {LIMIT_S:.0f} s "
        f"(once: snapstream calibrate {folder})"
    )
