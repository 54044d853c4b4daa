"""A small DeepSeek-V3 in plain PyTorch for training, with the arithmetic and names of transformers' classes.

As ``model.py``, whose parts it shares: multi-head latent attention, dense first layers, and behind them experts with
sigmoid scores, a correction of the choice that is moved by their loads, and one shared expert. ``state_dict()`` has the
experts one by one, as checkpoints do; ``build.py`` stacks them for transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.model import COMMON, MLP, Layer, RMSNorm, TinyConfig, TrainedModel, start_embedding

LATENT_EPS = 1e-6  # of the norm of a latent, whatever rms_eps says


@dataclass(frozen=True, kw_only=True)
class TinyLatentConfig(TinyConfig):
    """Shape of the model; ``head_dim`` is the rotated part of a head, as in config.json."""

    kv_rank: int
    nope_dim: int
    value_dim: int
    first_dense: int
    num_experts: int
    top_k: int
    expert_size: int
    balance_rate: float  # by which the correction of an expert moves per step, against its load

    @property
    def query_dim(self) -> int:
        """Numbers of a query head."""
        return self.nope_dim + self.head_dim


class LatentAttention(nn.Module):
    """Causal attention over latents ``c | r``, expanded to keys and values of every head."""

    def __init__(self, config: TinyLatentConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_heads
        self.q_proj = nn.Linear(hidden, heads * config.query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_rank + config.head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(config.kv_rank, heads * (config.nope_dim + config.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.value_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        config = self.config
        cos, sin = (turn[:, : config.head_dim // 2] for turn in (cos, sin))  # [T, P / 2]
        queries = self.q_proj(x).view(batch, length, config.num_heads, -1).transpose(1, 2)  # [B, H, T, N + P]
        latent, turned = self.kv_a_proj_with_mqa(x).split((config.kv_rank, config.head_dim), -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, config.num_heads, -1).transpose(1, 2)
        q_nope, q_turned = queries.split((config.nope_dim, config.head_dim), -1)
        k_nope, values = both.split((config.nope_dim, config.value_dim), -1)
        k_turned = _rotate_pairs(turned[:, None], cos, sin).expand(-1, config.num_heads, -1, -1)
        q = torch.cat((q_nope, _rotate_pairs(q_turned, cos, sin)), -1)
        k = torch.cat((k_nope, k_turned), -1)
        # PyTorch's fast attention on a CPU wants one size of heads: zeros fill the values up.
        wide = F.pad(values, (0, q.shape[-1] - config.value_dim))
        out = F.scaled_dot_product_attention(q, k, wide, is_causal=True)[..., : config.value_dim]
        merged: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return merged


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the pairs (0, 1), (2, 3) ...; halves come out. x [B, heads, T, P], cos and sin [T, P / 2]."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Router(nn.Module):
    """Scores of the experts; ``e_score_correction_bias`` is added for the choice alone."""

    def __init__(self, config: TinyLatentConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(config.num_experts))


class Experts(nn.Module):
    """The chosen experts of each token, weighted, and the shared one."""

    def __init__(self, config: TinyLatentConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(config)
        self.experts = nn.ModuleList(MLP(config.hidden_size, config.expert_size) for _ in range(config.num_experts))
        self.shared_experts = MLP(config.hidden_size, config.expert_size)
        self.loads = torch.zeros(config.num_experts)  # tokens of the last batch by expert

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # [T, D]
        scores = F.linear(flat, self.gate.weight).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.config.top_k, -1).indices  # [T, k]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        self.loads = torch.bincount(chosen.flatten(), minlength=self.config.num_experts)
        out = self.shared_experts(flat)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


class TinyLatentModel(TrainedModel):
    """DeepSeek-V3."""

    config: TinyLatentConfig

    def __init__(self, config: TinyLatentConfig) -> None:
        super().__init__(config, ("o_proj", "down_proj"))

    def make_layer(self, index: int) -> nn.Module:
        config = self.config
        is_dense = index < config.first_dense
        return Layer(
            config,
            lambda: LatentAttention(config),
            lambda: MLP(config.hidden_size, config.intermediate_size) if is_dense else Experts(config),
        )

    def head_start(self) -> None:
        """As ``TinyModel``'s: the first two layers begin where looking up and copying is a small step away.

        What differs: every head has the same rotated key, the common component, and a head's distance is the angle of
        its query. Whatever is compared or copied goes through c, whose rows begin as ``content | near | far``: keys
        and values of a head read their part of it. c is normed, so keys and values have the size of one, and what the
        plain model puts into keys stands in queries and outputs here.
        """
        config = self.config
        size, width, rank = config.value_dim, config.hidden_size, config.kv_rank
        copied = rank - 2 * size  # content that c holds: up to half the width
        near, far = slice(width // 2, width // 2 + size), slice(width - size, width)
        in_c = {"content": slice(0, size), "near": slice(copied, copied + size), "far": slice(copied + size, rank)}
        common = COMMON * config.init_std
        embedding = self.model.embed_tokens.weight
        rms = start_embedding(embedding, config)
        of_copied = embedding[:, 1:copied].pow(2).sum(-1).mean()  # squared size of the content in c

        first, second = (layer.self_attn for layer in list(self.model.layers)[:2])
        for attention in (first, second):
            for projection in (attention.q_proj, attention.kv_a_proj_with_mqa, attention.kv_b_proj, attention.o_proj):
                projection.weight *= 0.1
            rows = attention.kv_a_proj_with_mqa.weight
            rows[:copied, :copied] = torch.eye(copied)
            rows[:rank, 0] = 0
            rows[in_c["near"], near] = torch.eye(size)
            rows[in_c["far"], far] = torch.eye(size)

        # First layer: head h looks h + 1 back, through the rotated part alone; values are the content.
        thetas = config.rope_theta ** -(torch.arange(config.head_dim // 2) / (config.head_dim // 2))
        fast = (thetas > 0.01).float()
        lost_by_neighbour = (fast * (1 - thetas.cos())).sum() / config.query_dim**0.5
        amplitude = (config.previous_logit / lost_by_neighbour).sqrt() / (common / rms)
        turned = first.kv_a_proj_with_mqa.weight[rank:]
        turned[0::2, 0], turned[1::2, 0] = fast * amplitude, 0.0
        norm_of_c = (of_copied / rank).sqrt()  # by which the content is divided in c
        for head in range(config.num_heads):
            queries = first.q_proj.weight.view(config.num_heads, config.query_dim, width)[head, config.nope_dim :]
            angles = (head + 1) * thetas
            queries[0::2, 0], queries[1::2, 0] = fast * angles.cos() * amplitude, -fast * angles.sin() * amplitude
            values = self._values(first, head)
            values[:, in_c["content"]] = torch.eye(size)
            slot = near if head < config.num_heads // 2 else far
            first.o_proj.weight[slot, head * size : (head + 1) * size] = torch.eye(size) * 0.7 * norm_of_c

        # Second layer: queries read content or a slot, keys the slot in c, and what is found there is copied.
        grown = rms * 1.6  # of the residual stream behind the first layer
        matched = size * (config.init_std * 2**0.5) ** 2 / (grown * grown)  # product of equal slots, both normed
        scale = config.match_logit * config.query_dim**0.5 / matched
        sources = (slice(0, size), far, near, far)
        for head, source in enumerate(sources):
            queries = second.q_proj.weight.view(config.num_heads, config.query_dim, width)[head, : config.nope_dim]
            queries[: config.nope_dim, source] = torch.eye(size)[: config.nope_dim] * scale
            is_near = head < config.num_heads // 2
            keys = second.kv_b_proj.weight.view(config.num_heads, -1, rank)[head, : config.nope_dim]
            keys[:, in_c["near" if is_near else "far"]] = torch.eye(size)[: config.nope_dim]
            found = slice(0, size) if is_near or copied < 2 * size else slice(size, 2 * size)
            self._values(second, head)[:, found] = torch.eye(size)
            second.o_proj.weight[found, head * size : (head + 1) * size] = torch.eye(size) * config.copy_gain * rms

    @staticmethod
    def _values(attention: LatentAttention, head: int) -> Tensor:
        """Rows of ``kv_b_proj`` that make a head's values, ``[U, R]``."""
        config = attention.config
        return attention.kv_b_proj.weight.view(config.num_heads, -1, config.kv_rank)[head, config.nope_dim :]

    @torch.no_grad()
    def balance(self) -> None:
        """Move the correction of every expert against its load of the last batch (arXiv 2412.19437, section 2.1.2)."""
        for layer in self.model.layers:
            if isinstance(layer.mlp, Experts):
                loads = layer.mlp.loads.float()
                layer.mlp.gate.e_score_correction_bias += layer.mlp.config.balance_rate * (loads.mean() - loads).sign()
