"""The draft: a small model and its tokenizer, which together give every character range of a text a score.

Invariant: scores are laid over the *source text* by the tokenizer's character offsets, so a kept part of the text is
kept character by character; token ids never leave this module. A text longer than the context is read in overlapping
passages of one size, each with the words around it (a template, a question) in full; where two passages overlap, a
token's score is the mean.

The draft reads a prompt layer by layer, decodes a few greedy tokens ahead, and scores every prompt token with their
queries. The prefill keeps K and V of all layers for the decode steps, ``2 L G E`` numbers per prompt token in the
draft's dtype; the memory is bounded by the draft's context (``context_len``), not by the text. With ``look_ahead=0``
the prompt's own last queries score while their layer's keys are staged: one layer of K and V, and the last layer stops
after its keys and queries, because nothing reads its output.

Greedy tokens make scores deterministic: the same draft, text and settings give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from snapstream.config import DTYPE_BYTES, DType, KVBudget, as_path
from snapstream.config.values import check_choice
from snapstream.exec.eager import RowsForward, StepParts
from snapstream.exec.looped_cpu import LoopedDecode, panels_for
from snapstream.exec.rows import RecentQueries, Rows
from snapstream.exec.sampling_state import SamplingState
from snapstream.kernels.backends.autotune import automatic
from snapstream.kernels.backends.prefill import Case
from snapstream.kernels.cpu.looped.library import library_problem
from snapstream.kernels.memory import check_usable
from snapstream.kernels.pytorch import capped_
from snapstream.kv.cache import KVCache
from snapstream.kv.compress import write_rows
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.models.chat_template import render_chat
from snapstream.models.decoder import Decoder
from snapstream.models.gguf_header import is_gguf
from snapstream.models.hub import local_folder
from snapstream.models.matrix import make_matrix
from snapstream.models.panels import PanelMatrix
from snapstream.models.prefill import LayerDone, LayerPass, Outputs, PassTokens
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import load_tokenizer
from snapstream.models.views import StagingBuffers
from snapstream.spec_prefill.settings import (
    OWN_QUERIES,
    POOL_KERNEL,
    ScoringSettings,
    num_passages,
    num_prefill_tokens,
    step_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHUNK = 4096  # keys at a time; 8 queries x 32 heads x 4096 keys in fp32 are 4 MiB


class Importance:
    """Scores of SpecPrefill: running maximum over layers and heads of the pooled attention, ``[w, N]`` fp32.

    As published (arXiv 2502.02789, section 3; arXiv 2603.02631): per query, layer and head an fp32 softmax over the
    *prompt* keys only; an average over ``POOL_KERNEL`` adjacent keys; the maximum over layers and heads; the mean over
    queries. At the edges the average counts missing keys as zeros and always divides by ``POOL_KERNEL``, like SnapKV.
    At most ``O(queries x heads x chunk)`` of probabilities exist at a time.
    """

    def __init__(self, num_queries: int, num_keys: int, device: torch.device) -> None:
        self.best = torch.zeros(num_queries, num_keys, device=device)  # [w, N]; probabilities are never below 0

    def add(
        self, queries: Tensor, keys: Tensor, first_query: int, *, sinks: Tensor | None = None,
        cap: float | None = None, chunk: int = CHUNK,
    ) -> None:  # fmt: skip
        """One layer: ``queries [w, H, E]`` after RoPE, the first at position ``first_query``; ``keys [G, N, E]``.

        A query sees the prompt keys up to its own position: all of them, if it comes after the prompt. Learned
        attention ``sinks [H]`` take their share of its probability; ``cap``: see ``reference.capped``.
        """
        num_queries, num_heads, _ = queries.shape
        half, num_keys = POOL_KERNEL // 2, keys.shape[1]
        normaliser = torch.full((num_heads * num_queries,), float("-inf"), device=keys.device)
        if sinks is not None:
            normaliser = sinks.repeat_interleave(num_queries)
        for _, _, block in _logits(queries, keys, first_query, 0, chunk, cap):
            normaliser = torch.logaddexp(normaliser, block.logsumexp(-1))
        for a, b, block in _logits(queries, keys, first_query, half, chunk, cap):
            weights = block.sub_(normaliser[:, None]).exp_()  # [H*w, c + margins]
            before, after = min(half, a), min(half, num_keys - b)  # margins that the block holds
            padded = F.pad(weights, (half - before, half - after))
            pooled = F.avg_pool1d(padded[None], POOL_KERNEL, stride=1)[0]  # [H*w, c]
            most = pooled.unflatten(0, (num_heads, num_queries)).amax(0)  # [w, c]
            torch.maximum(self.best[:, a:b], most, out=self.best[:, a:b])

    def scores(self) -> Tensor:
        """Mean over the queries: ``[N]`` fp32."""
        return self.best.mean(0)


def _logits(
    queries: Tensor, keys: Tensor, first_query: int, margin: int, chunk: int, cap: float | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Blocks ``a .. b - 1`` of keys with ``margin`` further keys on both sides: ``[H*w, c + margins]`` fp32."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    scaled = queries.float() * head_dim**-0.5
    folded = scaled.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)  # [G, r*w, E]
    for a in range(0, num_keys, chunk):
        b = min(a + chunk, num_keys)
        low, high = max(0, a - margin), min(num_keys, b + margin)
        block = capped_(torch.bmm(folded, keys[:, low:high].float().transpose(1, 2)), cap).flatten(0, 1)  # [H*w, c]
        if high - 1 > first_query:  # some query may not see some key
            position = torch.arange(low, high, device=keys.device)
            own = first_query + torch.arange(num_queries, device=keys.device)
            block.masked_fill_((position > own[:, None]).repeat(num_heads, 1), float("-inf"))
        yield a, b, block


def chunk_means(scores: Tensor, chunk_len: int) -> Tensor:
    """Mean score of each run of ``chunk_len`` tokens, the last one shorter: ``[N]`` to ``[ceil(N / chunk_len)]``."""
    num_chunks = -(-scores.shape[0] // chunk_len)
    padded = F.pad(scores, (0, num_chunks * chunk_len - scores.shape[0])).view(num_chunks, chunk_len)
    counts = torch.full((num_chunks,), chunk_len, device=scores.device)
    counts[-1] = scores.shape[0] - (num_chunks - 1) * chunk_len
    return padded.sum(-1) / counts


SELECTOR = SnapKV()  # never asked: the look-ahead's rows hold the whole prompt

# Passage, layer, queries [w, H, E], keys [G, N, E] of the prompt, position of the first query.
Visit = Callable[[int, int, Tensor, Tensor, int], None]


@torch.inference_mode()
def visit_layers(decoder: Decoder, passages: Sequence[Sequence[int]], settings: ScoringSettings, visit: Visit) -> None:
    """Read passages of one length, look ahead of all of them together, and show every layer's scoring queries and keys
    to ``visit``.
    """
    prompts = [torch.tensor(ids, dtype=torch.int64, device=decoder.device) for ids in passages]
    prompt_len, ahead = len(prompts[0]), settings.look_ahead
    if ahead == 0:
        for index, ids in enumerate(prompts):

            def show(
                prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor, index: int = index
            ) -> None:
                assert queries is not None
                visit(index, layer, queries, keys, prompt_len - len(queries))

            _read(decoder, ids, min(OWN_QUERIES, prompt_len), show, "none")
        return
    look_ahead = _LookAhead(decoder, len(prompts), KVBudget.full(prompt_len + ahead), ahead)
    for row, ids in enumerate(prompts):
        look_ahead.read(row, ids)
    for row, tokens in enumerate(look_ahead.decode(settings)):
        first = prompt_len - 1  # the query of the last prompt token scores too
        queries = look_ahead.queries.last(row, first + len(tokens), len(tokens))  # [L, w, H, E]
        for layer in range(decoder.config.num_layers):
            visit(row, layer, queries[layer], look_ahead.cache.layer(layer).k[row, :, :prompt_len], first)


def scores_of_passages(
    decoder: Decoder, passages: Sequence[Sequence[int]], settings: ScoringSettings
) -> Iterator[Tensor]:
    """Score of every token of prompts of one length that fits the draft's context: ``[N]`` fp32 of each."""
    size = num_passages(decoder.device.type)
    for start in range(0, len(passages), size):
        group = passages[start : start + size]
        found: dict[int, Importance] = {}

        def add(
            index: int, layer: int, queries: Tensor, keys: Tensor, first: int, found: dict[int, Importance] = found
        ) -> None:
            if index not in found:
                found[index] = Importance(len(queries), keys.shape[1], decoder.device)
            found[index].add(queries, keys, first, sinks=decoder.sinks(layer), cap=decoder.config.score_cap)

        visit_layers(decoder, group, settings, add)
        yield from (found[index].scores() for index in range(len(group)))


def token_scores(decoder: Decoder, token_ids: Sequence[int], settings: ScoringSettings) -> Tensor:
    """As ``scores_of_passages``, of one prompt."""
    return next(scores_of_passages(decoder, [token_ids], settings))


class _LookAhead:
    """Rows of one budget for prompts of one length, and greedy decode of the tokens after them."""

    def __init__(self, decoder: Decoder, num_rows: int, budget: KVBudget, num_queries: int) -> None:
        """``num_queries``: of the last tokens fed to each row, kept in ``queries``."""
        spec, device = decoder.kv_spec(), decoder.device
        self._decoder, self._budget = decoder, budget
        # A draft feeds all its rows at every step, so the padding row, which is the last, may be one of them.
        self.cache = KVCache(spec, num_rows - 1, budget.capacity, device, decoder.kernels, sinks=decoder.sinks)
        self.queries = RecentQueries(spec, num_rows - 1, num_queries, decoder.dtype, device)
        self._rows = Rows(num_rows - 1, device)
        self._forward: RowsForward | LoopedDecode
        dtype = str(decoder.dtype).removeprefix("torch.")
        config = step_config(decoder.config, budget, num_rows, dtype=dtype, device=device.type)
        if config is not None and isinstance(decoder.weights.lm_head, PanelMatrix):
            sampling = SamplingState(num_rows, decoder.config.vocab_size, device)
            parts = StepParts(
                decoder=decoder, cache=self.cache, rows=self._rows, sampling=sampling, config=config,
                queries=self.queries,
            )  # fmt: skip
            self._forward = LoopedDecode(parts)
        else:
            self._forward = RowsForward(decoder, self.cache, self._rows, self.queries)
        self._hidden: list[Tensor] = []  # by row: output of the last prompt token [1, D]
        self._prompt_len = 0

    def read(self, row: int, ids: Tensor) -> None:
        """Prefill ``ids [N]`` into a row."""
        self._prompt_len = len(ids)

        def write(prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor) -> None:
            assert queries is not None
            self.queries.put(layer, row, self._prompt_len - 1, queries[-1])
            write_rows(self.cache, layer, (row,), keys, values, queries, self._budget, SELECTOR)

        self._hidden.append(_read(self._decoder, ids, 1, write, "last"))

    def decode(self, settings: ScoringSettings) -> list[list[int]]:
        """Greedy tokens after the prompts, ``look_ahead`` of each, fewer where the draft ends.

        All but the last are fed. A row that has ended is fed on with the others, without effect. RuntimeError where
        logits are not finite.
        """
        device, ends = self._decoder.device, () if settings.ignore_eos else self._decoder.config.eos_token_ids
        rows = torch.arange(len(self._hidden), dtype=torch.int64, device=device)
        counters = self._rows.entry(self._prompt_len, self._budget)
        self._rows.admit(rows, torch.tensor([counters] * len(rows), dtype=torch.int64, device=device))
        tokens = _best(self._decoder.logits(torch.cat(self._hidden)))  # [B]
        self._rows.last_token[rows] = tokens
        decoded = [[token] for token in tokens.tolist()]
        for _ in range(settings.look_ahead - 1):
            if all(own[-1] in ends for own in decoded):
                break
            tokens = _best(self._forward.logits(rows))
            self._rows.advance(rows, tokens)
            for own, token in zip(decoded, tokens.tolist(), strict=True):
                if own[-1] not in ends:
                    own.append(token)
        return decoded


def _best(logits: Tensor) -> Tensor:
    """The likeliest token of each of ``logits [B, V]``: ``[B]``. RuntimeError where they are not finite."""
    if not bool(logits.amax(-1).isfinite().all()):
        raise RuntimeError("the draft's logits are not finite; it cannot score a prompt")
    return logits.argmax(-1)


def _read(decoder: Decoder, ids: Tensor, num_queries: int, layer_done: LayerDone, outputs: Outputs) -> Tensor:
    """Run ``ids [N]`` layer by layer; returns the last token's output ``[1, D]``."""
    config, device = decoder.config, decoder.device
    positions = torch.arange(len(ids), device=device)
    tokens = PassTokens(
        token_ids=ids,
        positions=positions,
        seq_lens=torch.full_like(positions, len(ids)),
        prompt_lens=[len(ids)],
        num_queries=[num_queries],
    )
    buffers = StagingBuffers(decoder.kv_spec(), config.stream_size, len(ids), decoder.dtype, device)
    attention = automatic(Case.of_model(device, decoder.dtype, config))
    step = num_prefill_tokens(device.type)
    one = LayerPass(decoder, buffers, tokens, step, attention, layer_done, outputs)
    one.run()
    return one.last_hidden()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """A text as the draft reads it: ``ids[first:stop]`` are its tokens, the others are around it."""

    ids: tuple[int, ...]
    first: int
    stop: int
    starts: tuple[int, ...]  # of each of its tokens: first character, never decreasing

    @property
    def num_tokens(self) -> int:
        """Tokens of the text itself."""
        return self.stop - self.first


class Draft:
    """A loaded draft."""

    def __init__(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} is a slow tokenizer, which gives no character offsets; "
                "a draft needs a tokenizer.json"
            )
        self.decoder, self.tokenizer = decoder, tokenizer

    @classmethod
    def load(cls, folder: str | Path, *, dtype: DType = "float32", device: str = "cpu", progress: bool = False) -> Self:
        """Read a checkpoint folder or a GGUF file. ValueError, with the reason, for a model that cannot be a draft."""
        check_choice("dtype", dtype, tuple(DTYPE_BYTES))
        folder = local_folder(as_path("the draft's folder", folder), progress=progress)
        check_usable(device)
        config = read_model_config(folder)
        if config.recurrent_layers:
            raise ValueError(f"{folder}: {config.architecture} has recurrent layers; a draft needs attention in each")
        if config.windows is not None:
            raise ValueError(
                f"{folder}: {config.architecture} has layers with sliding windows; a draft must see the whole text"
            )
        if not is_gguf(folder) and not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            raise ValueError(f"{folder} has no tokenizer; a draft needs a tokenizer.json")
        tokenizer = load_tokenizer(folder)
        looped = step_config(config, KVBudget.full(config.max_position), 1, dtype=dtype, device=device)
        make = make_matrix if looped is None or library_problem() else panels_for(looped)
        decoder = Decoder.load(folder, config, dtype, device, progress=progress, make=make)
        return cls(decoder, tokenizer)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text on its own, without special ones."""
        return len(self._encode(text, special=False)["input_ids"])

    def read(self, text: str, *, before: str = "", after: str = "", as_chat: bool = False) -> ReadText:
        """Tokenize ``text`` with the words around it; ``as_chat`` puts all of it into a user message.

        A draft without a chat template reads the plain words.
        """
        if not text:
            return ReadText(ids=(), first=0, stop=0, starts=())
        whole, start = before + text + after, len(before)
        template = as_chat and self.tokenizer.chat_template is not None
        if template:
            rendered = render_chat(self.tokenizer, [{"role": "user", "content": whole}])
            found = _place_of(whole, rendered)
            template = found is not None
            if found is not None:  # else the template alters the words: read them without it
                whole, start = rendered, found + len(before)
        encoded = self._encode(whole, special=not template)
        stop = start + len(text)
        inside = [
            i
            for i, ((a, b), special) in enumerate(
                zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
            )
            if a < stop and b > start and a < b and not (special and a == b)
        ]
        ids = tuple(encoded["input_ids"])
        if not inside:
            return ReadText(ids=ids, first=0, stop=0, starts=())
        offsets = encoded["offset_mapping"][inside[0] : inside[-1] + 1]
        clipped = (min(max(a, start), stop) - start for a, _ in offsets)
        return ReadText(ids=ids, first=inside[0], stop=inside[-1] + 1, starts=tuple(accumulate(clipped, max)))

    def score(self, text: ReadText, settings: ScoringSettings) -> tuple[Tensor, int]:
        """Score of each token of the text, ``[n]`` fp32, and in how many passages it was read."""
        limit = self.context_of(settings)
        around = len(text.ids) - text.num_tokens
        room = limit - settings.look_ahead - around
        if text.num_tokens <= room:
            return token_scores(self.decoder, text.ids, settings)[text.first : text.stop], 1
        if room < 2:
            raise ValueError(f"{around} tokens around the text leave no room among the {limit} that the draft reads")
        head, tail = text.ids[: text.first], text.ids[text.stop :]
        total, count = torch.zeros(2, text.num_tokens)
        passages = passages_of(text.num_tokens, room, min(settings.overlap, room // 2))
        read = [(*head, *text.ids[text.first + a : text.first + b], *tail) for a, b in passages]
        for (a, b), scores in zip(passages, scores_of_passages(self.decoder, read, settings), strict=True):
            total[a:b] += scores[text.first : text.first + b - a].cpu()
            count[a:b] += 1
        return total / count, len(passages)

    def context_of(self, settings: ScoringSettings) -> int:
        """Tokens that are read at once, look-ahead included. ValueError for a ``context_len`` that cannot work."""
        limit, least = self.decoder.config.max_position, settings.look_ahead + 2
        if settings.context_len > limit:
            raise ValueError(f"context_len is {settings.context_len}; the draft reads at most {limit} tokens")
        if 0 < settings.context_len < least:
            raise ValueError(
                f"context_len is {settings.context_len}; a look-ahead of {settings.look_ahead} needs {least}"
            )
        return settings.context_len or limit

    def _encode(self, text: str, *, special: bool) -> Any:
        return self.tokenizer(
            text,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,  # texts longer than the context are expected
        )


def passages_of(num_tokens: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """Passages of exactly ``room`` tokens that cover ``num_tokens``, consecutive ones sharing ``overlap`` or more."""
    starts = list(range(0, max(num_tokens - room, 0), room - overlap))
    return [*((a, a + room) for a in starts if a + room < num_tokens), (max(num_tokens - room, 0), num_tokens)]


def _place_of(words: str, rendered: str) -> int | None:
    """Where ``words`` begin in a rendered template, which may have stripped them; negative if it cut the front."""
    found = rendered.find(words)
    if found >= 0:
        return found
    found = rendered.find(words.strip())
    if found < 0 or not words.strip():
        return None
    return found - (len(words) - len(words.lstrip()))
