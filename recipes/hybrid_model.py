"""A small LFM2 in plain PyTorch for training, with the arithmetic and names of transformers' classes.

As ``model.py``, whose parts it shares: most layers are gated short convolutions, which keep the last inputs of their
taps and nothing else; the others are full attention with norms on queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.model import COMMON, RMSNorm, TinyConfig, parts, rotate, rotations, start_embedding, start_lookup

CONV, FULL = "conv", "full_attention"
GROWN = 1.3  # head start: size of the residual stream behind the first layer, in units of an embedding


@dataclass(frozen=True, kw_only=True)
class TinyHybridConfig(TinyConfig):
    """Shape of the model; names as in config.json."""

    layer_types: list[str]  # "conv" or "full_attention", by layer
    conv_taps: int  # tokens that a convolution sees, the current one among them


class ShortConv(nn.Module):
    """``out_proj(c * conv(b * x))`` of ``b | c | x``, three projections of the input; a filter per channel."""

    def __init__(self, config: TinyHybridConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.conv = nn.Conv1d(hidden, hidden, config.conv_taps, groups=hidden, bias=False)
        self.out_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        gate, out_gate, x = self.in_proj(h).chunk(3, dim=-1)  # [B, T, D] each
        taps = self.conv.weight[:, 0]  # [D, K], the last of the current token
        count, length = taps.shape[1], h.shape[1]
        past = F.pad(gate * x, (0, 0, count - 1, 0))
        mixed = sum(taps[:, at] * past[:, at : at + length] for at in range(count))  # faster here than conv1d
        out: Tensor = self.out_proj(out_gate * mixed)
        return out


class FullAttention(nn.Module):
    """Causal attention with rotary positions, grouped key-value heads, and norms on queries and keys."""

    def __init__(self, config: TinyHybridConfig) -> None:
        super().__init__()
        self.config = config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.out_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_layernorm = RMSNorm(config.head_dim, config.rms_eps)
        self.k_layernorm = RMSNorm(config.head_dim, config.rms_eps)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = h.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.config.head_dim).transpose(1, 2)  # [B, heads, T, E]

        q = rotate(self.q_layernorm(heads(self.q_proj(h))), cos, sin)
        k = rotate(self.k_layernorm(heads(self.k_proj(h))), cos, sin)
        repeat = self.config.num_heads // self.config.num_kv_heads
        k, v = (y.repeat_interleave(repeat, dim=1) for y in (k, heads(self.v_proj(h))))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: Tensor = self.out_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return merged


class FeedForward(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: TinyHybridConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class HybridLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: TinyHybridConfig, kind: str) -> None:
        super().__init__()
        if kind == FULL:
            self.self_attn = FullAttention(config)
        else:
            self.conv = ShortConv(config)
        self.feed_forward = FeedForward(config)
        self.operator_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.is_full = kind == FULL

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixer = self.self_attn if self.is_full else self.conv
        x = x + mixer(self.operator_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class HybridBody(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: TinyHybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HybridLayer(config, kind) for kind in config.layer_types)
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_eps)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = rotations(self.config, ids.shape[1])
        x: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.embedding_norm(x)
        return out


class TinyHybridModel(nn.Module):
    """The model; the output projection is the embedding."""

    def __init__(self, config: TinyHybridConfig) -> None:
        super().__init__()
        self.model = HybridBody(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out_proj.weight", "w2.weight"))
                nn.init.normal_(parameter, std=0.1 * config.init_std if residual else config.init_std)
        self._head_start(config)

    @torch.no_grad()
    def _head_start(self, config: TinyHybridConfig) -> None:
        """As ``TinyModel``'s: the layers before the first full one note in slots what stood 1 to 4 tokens back, and
        the full one compares. Nothing is frozen.

        Gates of a convolution are linear in its input, so the component that all embeddings share makes them one, and
        the layer is a plain filter: a tap that is one moves a channel by its distance. The first layer puts the tokens
        1 and 2 back into near and the one 3 back into far; the second moves far by one more token.
        """
        size = config.head_dim
        content, near, far = parts(config)
        rms = start_embedding(self.model.embed_tokens.weight, config)
        layers = [layer for layer in self.model.layers if isinstance(layer, HybridLayer)]
        convolutions = [layer.conv for layer in layers if not layer.is_full]
        for conv in convolutions:
            conv.in_proj.weight *= 0.1
            conv.out_proj.weight *= 0.1
            # Behind the first layer the stream is larger, and its norm makes the shared component smaller.
            one = rms * (1.0 if conv is convolutions[0] else GROWN) / (COMMON * config.init_std)
            conv.in_proj.weight[: 2 * config.hidden_size, 0] = one
        first, second = convolutions[:2]
        moves = ((first, near, content, (1, 2)), (first, far, content, (3,)), (second, far, far, (1,)))
        for conv, slot, source, distances in moves:
            channels = slice(2 * config.hidden_size + slot.start, 2 * config.hidden_size + slot.stop)
            conv.in_proj.weight[channels] = 0
            conv.in_proj.weight[channels, source] = torch.eye(size)
            conv.in_proj.weight[channels, 0] = 0
            taps = conv.conv.weight[slot, 0]  # [E, K]
            taps.zero_()
            for distance in distances:
                taps[:, config.conv_taps - 1 - distance] = 1
            conv.out_proj.weight[slot, slot] = torch.eye(size) * rms * (0.7 if conv is first else GROWN)

        full = next(layer.self_attn for layer in layers if layer.is_full)
        start_lookup((full.q_proj, full.k_proj, full.v_proj, full.out_proj), config, rms)
        for norm in (full.q_layernorm, full.k_layernorm):  # as of Qwen3's norms in ``TinyModel``
            norm.weight.fill_((2 * config.match_logit / size**0.5) ** 0.5)

    def balance(self) -> None:
        """Nothing: there are no experts whose loads differ."""

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states [B, T, D] of ids [B, T]."""
        out: Tensor = self.model(ids)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        return F.linear(hidden, self.model.embed_tokens.weight)
