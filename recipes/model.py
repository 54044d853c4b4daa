"""A Llama or Qwen3 in plain PyTorch for training, with the arithmetic and names of transformers' classes.

It exists because training needs logits at few positions only (the answers), where a small model with a large
vocabulary would otherwise spend most of its time. `state_dict()` is the checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = "o_proj", "q_norm", "k_norm"  # of an attention's output projection and norms
COMMON = 4.0  # head start: the dimension that all embeddings share, in units of init_std


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Shape of the model."""

    architecture: str  # "llama", or "qwen3": the same with norms on queries and keys
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    init_std: float
    previous_logit: float  # head start: score of the right distance above its neighbours, first layer
    match_logit: float  # head start: score of one equal token, second layer
    match_theta: float  # head start: rotary dimensions slower than this compare tokens
    copy_gain: float  # head start: size of what is copied, relative to an embedding


class RMSNorm(nn.Module):
    """Root mean square norm with a gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key-value heads."""

    def __init__(self, config: TinyConfig, *, has_norms: bool, names: tuple[str, str, str] = NAMES) -> None:
        """``names``: of the output projection and of the norms of queries and keys, in the checkpoint."""
        super().__init__()
        self.config, self.names, self.has_norms = config, names, has_norms
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.add_module(names[0], nn.Linear(query, config.hidden_size, bias=False))
        for name in names[1:] if has_norms else ():
            self.add_module(name, RMSNorm(config.head_dim, config.rms_eps))

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """Queries, keys, values, output."""
        return self.q_proj, self.k_proj, self.v_proj, getattr(self, self.names[0])

    def set_gains(self, score: float) -> None:
        """Norms of queries and keys whose equal directions then score so much: their lengths are sqrt(head_dim)."""
        for name in self.names[1:]:
            getattr(self, name).weight.fill_((score / self.config.head_dim**0.5) ** 0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.config.head_dim).transpose(1, 2)  # [B, heads, T, E]
            for projection in self.projections[:3]
        )
        if self.has_norms:
            q, k = (getattr(self, name)(y) for name, y in zip(self.names[1:], (q, k), strict=True))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: Tensor = self.projections[3](out.transpose(1, 2).reshape(batch, length, -1))
        return merged


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention: x [B, heads, T, E], cos and sin [T, E]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotations(config: TinyConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the first positions, each [T, E]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer of an attention and an MLP, or experts."""

    def __init__(
        self, config: TinyConfig, make_attention: Callable[[], nn.Module], make_mlp: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.self_attn = make_attention()
        self.mlp = make_mlp()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: TinyConfig, make_layer: Callable[[int], nn.Module], norm: str) -> None:
        super().__init__()
        self.config, self.norm_name = config, norm
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(make_layer(index) for index in range(config.num_layers))
        self.add_module(norm, RMSNorm(config.hidden_size, config.rms_eps))

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = rotations(self.config, ids.shape[1])
        x: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = getattr(self, self.norm_name)(x)
        return out


class TrainedModel(nn.Module, ABC):
    """A model to train; the output projection is the embedding."""

    def __init__(self, config: TinyConfig, residual: tuple[str, str], norm: str = "norm") -> None:
        """``residual``: names of the projections that add to the residual stream; ``norm``: of the final norm."""
        super().__init__()
        self.config = config
        self.model = Body(config, self.make_layer, norm)
        ends = tuple(f"{name}.weight" for name in residual)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.1 * config.init_std if name.endswith(ends) else config.init_std)
        with torch.no_grad():
            self.head_start()

    @abstractmethod
    def make_layer(self, index: int) -> nn.Module:
        """A layer, without its initial weights."""

    @abstractmethod
    def head_start(self) -> None:
        """Initial weights from which looking up and copying is a small step away."""

    def balance(self) -> None:
        """Even out the loads of experts, if there are some."""

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states [B, T, D] of ids [B, T]."""
        out: Tensor = self.model(ids)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        return F.linear(hidden, self.model.embed_tokens.weight)


def parts(config: TinyConfig) -> tuple[slice, slice, slice]:
    """Dimensions of the residual stream that the head start calls content (its beginning), near and far."""
    size, width = config.head_dim, config.hidden_size
    return slice(0, size), slice(width // 2, width // 2 + size), slice(width - size, width)


@torch.no_grad()
def start_embedding(embedding: Tensor, config: TinyConfig) -> Tensor:
    """Content in the first half of ``embedding [V, D]``, its dimension 0 common to all tokens; the size of a number."""
    half = config.hidden_size // 2
    embedding[:, :half] *= 2**0.5
    embedding[:, half:] *= 0.1
    embedding[:, 0] = 0
    embedding /= embedding.norm(dim=-1, keepdim=True) / embedding.norm(dim=-1).mean()  # or norms are noise
    embedding[:, 0] = COMMON * config.init_std
    return embedding.pow(2).mean(-1).sqrt().mean()


@torch.no_grad()
def start_lookup(
    projections: tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear], config: TinyConfig, rms: Tensor
) -> None:
    """Queries, keys, values and output of a layer that compares slots: the slow half of the rotary dimensions does."""
    size, half = config.head_dim, config.head_dim // 2
    content, near, far = parts(config)
    repeat = config.num_heads // config.num_kv_heads
    eye, std = torch.eye(size), config.init_std * 2**0.5
    thetas = config.rope_theta ** -(torch.arange(half) / half)
    q_proj, k_proj, v_proj, o_proj = projections
    for projection in projections:
        projection.weight *= 0.1
    slow = torch.diag((thetas < config.match_theta).float().repeat(2))
    scale = (config.match_logit * size**0.5 / (slow.sum() * std**2 / (rms * 1.6) ** 2)).sqrt()
    for head, source in enumerate((content, far, near, far)):
        q_proj.weight[head * size : (head + 1) * size, source] = slow * scale
    for head, (source, target) in enumerate(((near, content), (far, slice(size, 2 * size)))):
        rows = slice(head * size, (head + 1) * size)
        k_proj.weight[rows, source] = slow * scale
        v_proj.weight[rows, target] = eye
        v_proj.weight[:, 0] = 0
        for query_head in range(repeat * head, repeat * (head + 1)):
            o_proj.weight[target, query_head * size : (query_head + 1) * size] = eye * config.copy_gain * rms


class TinyModel(TrainedModel):
    """Llama, or Qwen3."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config, ("o_proj", "down_proj"))

    def make_layer(self, index: int) -> nn.Module:
        config, has_norms = self.config, self.config.architecture == "qwen3"
        return Layer(
            config,
            lambda: Attention(config, has_norms=has_norms),
            lambda: MLP(config.hidden_size, config.intermediate_size),
        )

    def head_start(self) -> None:
        """Starts the first two layers where looking up and copying is a small step away. Nothing is frozen.

        Found by chance, the circuit that looks a key up takes most of the training time. So the residual stream
        starts in parts: content (the first half; its dimension 0 is common to all tokens) and two slots, `near` and
        `far`. Head h of the first layer looks h + 1 tokens back and notes what it sees in a slot: near for the
        first two heads, far for the others. In the second layer keys read the slots, queries read the content or a
        slot, and what is found there is copied: a token looks for places that had the same tokens shortly before.
        """
        config = self.config
        size, half = config.head_dim, config.head_dim // 2
        content, near, far = parts(config)
        common = COMMON * config.init_std
        rms = start_embedding(self.model.embed_tokens.weight, config)

        # First layer: head h looks h + 1 back. Queries and keys read the common component, turned against each
        # other by the rotary angle of h + 1 positions, so that their product peaks at that distance.
        thetas = config.rope_theta ** -(torch.arange(half) / half)
        fast = (thetas > 0.01).float()
        lost_by_neighbour = (1 - thetas.cos()).sum() / size**0.5  # of the score, one token off
        amplitude = (config.previous_logit / lost_by_neighbour).sqrt() / (common / rms)
        repeat = config.num_heads // config.num_kv_heads
        eye = torch.eye(size)
        first, second = (layer.self_attn for layer in list(self.model.layers)[:2])
        for projection in first.projections:
            projection.weight *= 0.1
        for head in range(config.num_heads):
            rows = slice(head * size, (head + 1) * size)
            kv_rows = slice(head // repeat * size, (head // repeat + 1) * size)
            angles = (head + 1) * thetas
            first.k_proj.weight[kv_rows, 0] = torch.cat((fast, torch.zeros(half))) * amplitude
            first.q_proj.weight[rows, 0] = torch.cat((fast * angles.cos(), -fast * angles.sin())) * amplitude
            first.v_proj.weight[kv_rows, content] = eye
            first.v_proj.weight[kv_rows, 0] = 0
            slot = near if head < config.num_heads // 2 else far
            first.o_proj.weight[slot, rows] = eye * rms * 0.7
        start_lookup(second.projections, config, rms)
        # Norms on queries and keys set the scores above. In the first layer one position off costs previous_logit; in
        # the second a slot holds two tokens, one of them equal is half the direction.
        if config.architecture == "qwen3":
            share_lost = (fast * (1 - thetas.cos())).sum() / fast.sum()
            first.set_gains(float(config.previous_logit / share_lost))
            second.set_gains(2 * config.match_logit)
