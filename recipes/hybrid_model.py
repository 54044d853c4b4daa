"""A small LFM2 in plain PyTorch for training, with the arithmetic and names of transformers' classes.

As ``model.py``, whose parts it shares: most layers are gated short convolutions, which keep the last inputs of their
taps and nothing else; the others are full attention with norms on queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.model import COMMON, Attention, RMSNorm, TinyConfig, TrainedModel, parts, start_embedding, start_lookup

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
            self.self_attn = Attention(config, has_norms=True, names=("out_proj", "q_layernorm", "k_layernorm"))
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


class TinyHybridModel(TrainedModel):
    """LFM2."""

    config: TinyHybridConfig

    def __init__(self, config: TinyHybridConfig) -> None:
        super().__init__(config, ("out_proj", "w2"), norm="embedding_norm")

    def make_layer(self, index: int) -> nn.Module:
        return HybridLayer(self.config, self.config.layer_types[index])

    def head_start(self) -> None:
        """As ``TinyModel``'s: the layers before the first full one note in slots what stood 1 to 4 tokens back, and
        the full one compares. Nothing is frozen.

        Gates of a convolution are linear in its input, so the component that all embeddings share makes them one, and
        the layer is a plain filter: a tap that is one moves a channel by its distance. The first layer puts the tokens
        1 and 2 back into near and the one 3 back into far; the second moves far by one more token.
        """
        config, size = self.config, self.config.head_dim
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
        start_lookup(full.projections, config, rms)
        full.set_gains(2 * config.match_logit)
