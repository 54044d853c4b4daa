"""What a model loses when one kv head forgets the middle of a prompt: every head in turn, on one prefill.

Invariant: the copies of a decode step differ in nothing but what one head sees. Copy 0 sees everything; copy ``i`` is
that without the candidates of head ``i - 1``, counted layer by layer: of these the head keeps sinks and recent tokens.
All copies share the prompt's keys and values; each has its own of the tokens that are fed later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.kernels.bound import CosSin, HeadNorm
from snapstream.models.layer_pass import LayerPass, PassTokens
from snapstream.runner.model_runner import ModelRunner


class Ablation:
    """One prompt and its copies; a ``KVView`` of one new token for each of them."""

    def __init__(self, runner: ModelRunner, token_ids: Sequence[int], num_sink: int, num_recent: int) -> None:
        """Reads the prompt through the runner's own buffers; nothing else may run on it."""
        self._decoder, device = runner.decoder, runner.decoder.device
        self._hidden = slice(num_sink, max(num_sink, len(token_ids) - num_recent))  # what a head forgets
        self._num_tokens = len(token_ids)
        self._prompt: list[tuple[Tensor, Tensor]] = []  # by layer: keys and values [G, N, E], fp32
        self._later: list[list[tuple[Tensor, Tensor]]] = []  # by layer and token: k and v [B, G, E], fp32
        tokens = PassTokens(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.arange(len(token_ids), device=device),
            seq_lens=torch.full((len(token_ids),), len(token_ids), device=device),
            prompt_lens=[len(token_ids)],
            num_queries=[0],
        )
        chunk_len = runner.config.chunking.chunk_len
        reading = LayerPass(
            runner.decoder, runner.buffers, tokens, chunk_len, runner.prefill_attention, self._layer_done, "none"
        )
        for unit in range(reading.num_units):
            reading.run_unit(unit)

    @property
    def num_copies(self) -> int:
        config = self._decoder.config
        return 1 + config.num_layers * config.num_kv_heads

    def feed(self, token: int) -> Tensor:
        """The same token for every copy: log-probabilities of the next, ``[B, V]`` fp32."""
        ids = torch.full((self.num_copies,), token, device=self._decoder.device)
        positions = torch.full_like(ids, self._num_tokens)
        rope = self._decoder.rope(positions, positions + 1)
        self._num_tokens += 1
        return self._decoder.run(self._decoder.embed(ids), rope, self).log_softmax(-1)

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """``heads [B, H+2G, E]`` -> ``[B, H, E]``: attention over the prompt, and over what was fed since."""
        assert rope is not None, "a model of latents has no heads to tell apart"
        groups = self._decoder.config.num_kv_heads
        qk = self._decoder.kernels.norm_rope(heads, norm, rope, groups)  # [B, H+G, E]
        self._later[layer].append((qk[:, -groups:].float(), heads[:, -groups:].float()))
        keys, values = self._prompt[layer]
        own_keys, own_values = (torch.stack(each, dim=2) for each in zip(*self._later[layer], strict=True))
        q = qk[:, :-groups].float().unflatten(1, (groups, -1)) * qk.shape[-1] ** -0.5  # [B, G, r, E]
        out = torch.empty_like(q)
        for head in range(groups):
            before = q[:, head] @ keys[head].T  # [B, r, N]
            before[1 + layer * groups + head, :, self._hidden] = float("-inf")
            since = q[:, head] @ own_keys[:, head].transpose(1, 2)  # [B, r, t]
            weights = torch.cat([before, since], dim=-1).softmax(-1)
            num_before = keys.shape[1]
            out[:, head] = weights[..., :num_before] @ values[head] + weights[..., num_before:] @ own_values[:, head]
        return out.flatten(1, 2).to(heads.dtype)

    def _layer_done(self, prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor) -> None:
        self._prompt.append((keys.float().clone(), values.float().clone()))
        self._later.append([])


@torch.inference_mode()
def damage(
    runner: ModelRunner, prompt: Sequence[int], answer: Sequence[int], num_sink: int, num_recent: int
) -> tuple[Tensor, int]:
    """How far the model's distributions over an answer move without each head: KL in nats, summed over its tokens.

    Returns ``[L, G]`` fp32 and the number of tokens that count. The answer is fed as it should be; its first token
    comes out of the prompt's prefill and is left out, so it needs two tokens at least.
    """
    if len(answer) < 2:
        raise ValueError(f"an answer of {len(answer)} tokens; the first comes out of the prefill and does not count")
    copies = Ablation(runner, prompt, num_sink, num_recent)
    total = torch.zeros(copies.num_copies - 1)
    for token in answer[:-1]:
        logs = copies.feed(token)
        total += (logs[0].exp() * (logs[0] - logs[1:])).sum(-1).cpu()
    return total.view(-1, runner.decoder.config.num_kv_heads), len(answer) - 1
