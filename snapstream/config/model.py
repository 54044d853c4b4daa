"""Shape of a model: ``models/registry.py`` reads it from config.json. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal, NamedTuple

from snapstream.config.recurrent import Mamba2, Recurrent
from snapstream.config.values import MAX_DIM, check
from snapstream.config.weights import StoredWeights


class SwiGLUClamp(NamedTuple):
    """In place of SwiGLU: ``(up + offset) * gate * sigmoid(alpha * gate)``, gate at most ``most_gate``, up within
    ``+-most_up`` (gpt-oss model card, arXiv 2508.10925, section 2.2).
    """

    most_gate: float
    most_up: float
    alpha: float = 1.0
    offset: float = 0.0


class LayerClamps(NamedTuple):
    """What clamps the activations of each layer, or None."""

    mlps: tuple[SwiGLUClamp | None, ...]  # of MLPs and of shared experts
    experts: tuple[SwiGLUClamp | None, ...]


Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["max", "top2"]
MAX_EXPERTS = 2**16  # each has its own names in a checkpoint


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts of a model in the place of an MLP, in all layers from ``first_dense`` on or in the ``chosen``."""

    num_experts: int  # X, those that the router chooses among
    top_k: int  # k, chosen per token
    inner: int  # M, inner size of one expert
    num_shared: int = 0  # experts that every token passes, stored as one MLP of inner size num_shared * M
    first_dense: int = 0  # so many first layers have an MLP of intermediate_size instead
    chosen: tuple[int, ...] | None = None  # the layers that have experts, where first_dense does not say it
    scoring: Scoring = "softmax"  # of the router's logits
    jitter: float = 0.0  # of sparsemixer: the shares of a logit that half of another's distance from it may be
    num_groups: int = 1  # experts are chosen inside the best top_groups of so many groups
    top_groups: int = 1
    group_score: GroupScore = "max"  # of a group: its best expert, or the sum of its two best
    normalise: bool = False  # the weights of the chosen experts are divided by their sum and least_sum
    least_sum: float = 1e-20
    scale: float = 1.0  # of the weights
    scales_inputs: bool = False  # weights multiply what experts read, not what they give (Llama 4)
    shared_scale: float = 1.0  # of the output of the shared experts
    has_bias: bool = False  # a correction of the scores, for the choice alone (DeepSeek-V3, arXiv 2412.19437, 2.1.2)
    chooses_by_logits: bool = False  # by logits, which are corrected, not by scores
    has_shared_gate: bool = False  # the output of the shared experts is times a learned sigmoid of the token
    has_expert_biases: bool = False  # gate, up and down of every expert have biases
    is_beside_mlp: bool = False  # they run next to every layer's MLP, and the router has its own norm (Gemma 4)
    latent: int = 0  # what a token is projected to for the experts that it is routed to; 0: they read it as it is
    held: range | None = None  # those of the num_experts on this rank; None: all
    own_shared: int = 0  # inner size of the shared experts on this rank with expert parallelism; 0: all

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "inner", "num_groups", "top_groups", "num_shared", "first_dense"):
            least = int(name not in ("num_shared", "first_dense"))
            check(getattr(self, name) >= least, f"{name} is {getattr(self, name)}; it must be >= {least}")
        check(
            not self.is_beside_mlp or (self.num_shared == 0 and self.first_dense == 0 and self.num_groups == 1),
            "experts beside an MLP are those of every layer, without shared experts and groups",
        )
        check(
            not (self.scales_inputs and (self.has_expert_biases or self.has_shared_gate)),
            "experts with biases or a gate of shared ones, whose inputs are scaled, are not supported",
        )
        check(
            self.scoring != "sparsemixer" or (self.top_k == 2 and self.num_groups == 1 and not self.has_bias),
            f"sparsemixer chooses two experts of all by their logits; top_k is {self.top_k}",
        )
        check(self.num_experts <= MAX_EXPERTS, f"num_experts is {self.num_experts}; it must be <= {MAX_EXPERTS}")
        check(
            self.num_experts % self.num_groups == 0,
            f"num_experts ({self.num_experts}) is not a multiple of num_groups ({self.num_groups})",
        )
        check(
            self.top_groups <= self.num_groups, f"top_groups is {self.top_groups}; there are {self.num_groups} groups"
        )
        check(
            self.top_k <= self.top_groups * self.group_len,
            f"top_k is {self.top_k}; it must be <= {self.top_groups * self.group_len}, the experts to choose among",
        )
        fewest = 2 if self.num_groups > 1 and self.group_score == "top2" else 1
        check(self.group_len >= fewest, f"a group has {self.group_len} experts; group_score 'top2' needs 2")

    @property
    def group_len(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups

    @property
    def shared_inner(self) -> int:
        """Inner size of the shared experts together, on this rank; 0 without."""
        return self.own_shared or self.num_shared * self.inner

    @property
    def own(self) -> range:
        """The experts on this rank."""
        return range(self.num_experts) if self.held is None else self.held

    def layers(self, num_layers: int) -> Sequence[int]:
        """The layers that have experts, ascending."""
        return range(min(self.first_dense, num_layers), num_layers) if self.chosen is None else self.chosen

    def num_read(self, num_tokens: int) -> float:
        """How many experts of a layer a step of ``num_tokens`` tokens reads, if tokens choose evenly."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1): a layer has one latent per token,
    from which keys and values of each head are expanded.

    A latent is ``c | r``: ``kv_rank`` numbers that are expanded, and ``rope_dim`` that are rotated and compared as they
    are, the same for every head.
    """

    q_rank: int | None  # Q, numbers between the two projections of the queries; None: one projection
    kv_rank: int  # R
    nope_dim: int  # numbers of a query head that are compared with the expanded key
    rope_dim: int  # P, numbers of a query head that are compared with r; 0: none
    value_dim: int  # U, numbers of an expanded value
    softmax_scale: float  # by which products of queries and keys are multiplied
    is_interleaved: bool = True  # the checkpoint rotates the pairs (0, 1), (2, 3) of the P numbers, not its halves
    norm_eps: float = 1e-6  # of the norms of c and of what queries are made of, independent of rms_norm_eps

    def __post_init__(self) -> None:
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            size, least = getattr(self, name), int(name != "rope_dim")
            check(least <= size <= MAX_DIM, f"{name} is {size}; it must be >= {least} and <= {MAX_DIM}")
        check(self.q_rank is None or self.q_rank >= 1, f"q_rank is {self.q_rank}; it must be >= 1")
        check(self.rope_dim % 2 == 0, f"rope_dim is {self.rope_dim}; rotary embedding needs an even size")
        check(
            self.latent_dim % 2 == 0,
            f"kv_rank ({self.kv_rank}) + rope_dim ({self.rope_dim}) is {self.latent_dim}; latents need an even size",
        )
        check(self.softmax_scale > 0, f"softmax_scale is {self.softmax_scale}; it must be over 0")

    @property
    def latent_dim(self) -> int:
        """Numbers that are kept of a token in one layer, and of a query that is compared with them."""
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a query head as projected, and of an expanded key."""
        return self.nope_dim + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """Numbers of an expanded key or value where prefill kernels want both of one size."""
        return max(self.query_dim, self.value_dim)


RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched. Field names follow ``transformers``."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # max_position before stretching; 0 where the kind does not use it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin; None: the formula of the paper
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn (DeepSeek variant)
    mscale_all_dim: float | None = None  # yarn (DeepSeek variant)
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    # longrope: divisors of the frequency of each pair, in sequences within the original context and in longer ones
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0  # proportional: of the pairs of a whole head that have an angle; those of the rest are 0
    partial_rotary_factor: float = 1.0  # share of a head that is rotated; the rest passes
    is_interleaved: bool = False  # the checkpoint rotates the pairs (0, 1), (2, 3) ... of a head, not its halves

    def rotary_dim(self, head_dim: int) -> int:
        """Numbers of a head that are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of a token depend on the length of its sequence, beyond the original context."""
        return self.kind == "dynamic" or self.short_factors != self.long_factors


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constants that a model multiplies with (Granite; arXiv 2408.13359, section 2)."""

    embedding: float = 1.0  # hidden states that enter the first layer
    residual: float = 1.0  # outputs of attention and of the MLP, before they are added
    attention: float = 1.0  # products of queries and keys, on top of the usual 1 / sqrt(E)
    logits: float = 1.0
    # Of Falcon-H1: outputs of attention, of the parallel recurrence and of the MLP; gates before their activation.
    attention_out: float = 1.0
    recurrent_out: float = 1.0
    mlp_out: float = 1.0
    mlp_gate: float = 1.0  # part of the norm before the MLP; so mlp_out is divided by it

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check(value > 0, f"the multiplier of {name} is {value}; it must be over 0")


class LengthScale(NamedTuple):
    """Queries are multiplied by ``1 + beta ln(1 + floor(position / original))`` (Llama 4, Ministral 3)."""

    beta: float
    original: int  # tokens within which nothing is scaled
    is_unrotated: bool = False  # in layers without rotary embedding and norms alone; positions count from 1 (Llama 4)


class LayerNorms(NamedTuple):
    """Names in the checkpoint of a layer's norms, by their place; None: there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of the output, before it is added to the residual stream
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None  # where there is none after attention, of experts alone

    @property
    def has_outputs(self) -> bool:
        """Whether outputs are normed before they are added."""
        return self.after_attention is not None

    @property
    def has_inputs(self) -> bool:
        """Whether attention and MLP read the norm of the residual stream, or the stream itself."""
        return self.before_attention is not None


# The last three are of MLPs without gate: ``down(relu(up x)^2)``, xIELU (``kernels.pytorch.xielu``), GELU by tanh.
Activation = Literal["silu", "gelu_tanh", "relu2", "xielu", "ungated_gelu"]


class HeadSizes(NamedTuple):
    """Heads in some of the layers."""

    num_kv_heads: int
    head_dim: int  # of queries too
    num_heads: int = 0  # of queries; 0: as many as in the others


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp:
    """Several residual streams of a token, of which layers compute the first and update the others by it (AltUp, Baykal
    et al., arXiv 2301.13310), with a low-rank branch next to attention (LAuReL, arXiv 2411.07501) and cut gates (Spark
    Transformer, arXiv 2506.06644), as in Gemma 3n.
    """

    num_streams: int
    laurel_rank: int  # numbers of a token in the low-rank branch
    sparsities: tuple[float, ...]  # by layer, the share of the gates of its MLP that are cut if they are normal

    def __post_init__(self) -> None:
        check(2 <= self.num_streams <= 16, f"{self.num_streams} residual streams are not supported; 2 to 16 are")
        check(1 <= self.laurel_rank <= MAX_DIM, f"laurel_rank is {self.laurel_rank}; it must be 1 to {MAX_DIM}")
        for share in self.sparsities:
            check(0.0 <= share < 1.0, f"activation sparsity is {share}; it must be >= 0 and < 1")

    def deviations(self, layer: int) -> float:
        """How many standard deviations above the mean of a layer's gates so many normal ones are cut."""
        return NormalDist().inv_cdf(share) if (share := self.sparsities[layer]) else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Several residual streams of a token, of which attention and MLP each read one sum and to which they add their
    output, by shares that the token decides (hyper-connections, Zhu et al., arXiv 2409.19606).

    With ``iterations`` the streams are mixed, too, by a matrix whose rows and columns add up to 1 (manifold-constrained
    hyper-connections, Xie et al., arXiv 2512.24880; GLM-5.3-Flash). With 0 each stays as it is (Hy V4).
    """

    num_streams: int
    iterations: int  # of Sinkhorn-Knopp
    most_added: float = 2.0  # by which the sigmoid is multiplied that is a stream's share of an output
    eps: float = 1e-6  # of shares, and of the sums that the matrix is divided by
    has_head: bool = True  # the streams behind the last layer are read like those before a layer; else their mean is

    def __post_init__(self) -> None:
        check(2 <= self.num_streams <= 16, f"{self.num_streams} residual streams are not supported; 2 to 16 are")
        check(0 <= self.iterations <= 1000, f"hc_sinkhorn_iters is {self.iterations}; it must be 0 to 1000")
        check(self.most_added > 0 and self.eps > 0, f"hc_magnitude and hc_eps must be over 0, not {self}")

    @property
    def num_shares(self) -> int:
        """Numbers that a token decides: what is read, what is added, and how streams are mixed."""
        return self.num_streams * (2 + (self.num_streams if self.iterations else 0))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder: all of a checkpoint but its weights."""

    architecture: str  # as in config.json, e.g. "LlamaForCausalLM"
    vocab_size: int  # V
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # G
    head_dim: int  # E
    intermediate_size: int  # I, of layers without experts
    max_position: int  # tokens of the context, after rope stretching
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    rotated_layers: tuple[bool, ...] | None = None  # by layer, whether rope turns its heads; None: all
    windows: tuple[int | None, ...] | None = None  # by layer, tokens that a query sees, None: all; None: all layers
    has_chunks: bool = False  # windows are chunks: a query sees only its own chunk (Llama 4)
    recurrent: Recurrent | None = None  # what the recurrent layers compute in place of attention
    recurrent_layers: tuple[int, ...] = ()  # indices of layers without keys and values, ascending
    # All layers have attention too: both read one normed input, and their outputs are added (Falcon-H1).
    has_parallel_recurrence: bool = False
    # Of layers with a single part and norm each (Nemotron-H): those that are an MLP or experts alone, ascending; the
    # others have none. None: every layer has both parts.
    mlp_layers: tuple[int, ...] | None = None
    multipliers: Multipliers = field(default_factory=Multipliers)
    is_text_part: bool = False  # of a checkpoint that also has towers for images, which are not loaded
    has_fused_qkv: bool = False  # q | k | v are one tensor of the checkpoint
    has_fused_gate_up: bool = False
    has_fused_experts: bool = False  # the checkpoint has all experts of a layer in one tensor
    has_transposed_experts: bool = False  # and the matrices in it transposed (Qwen3-VL)
    norms: LayerNorms = LayerNorms()
    recurrent_norms: LayerNorms | None = None  # of recurrent layers, where they differ (OLMo hybrid)
    # Attention and MLP read the same norm of the residual stream, and both outputs are added to it (Cohere).
    is_parallel: bool = False
    # The mean of a token's numbers is taken off the residual stream: an RMSNorm of it is then a LayerNorm without bias.
    is_centered: bool = False
    # Norms have biases; these are part of those of the products behind the norms, once loaded.
    has_norm_biases: bool = False
    has_head_bias: bool = False  # of the output embedding (Phi)
    out_norm_eps: float | None = None  # of norms of outputs; None: rms_norm_eps
    norm_offset: float = 0.0  # what norms add to their stored weights (Gemma: 1)
    activation: Activation = "silu"  # of gate
    clamps: LayerClamps | None = None
    window_rope: RopeConfig | None = None  # of the layers with sliding windows, where it differs from the others'
    length_scale: LengthScale | None = None  # of queries, by position
    full_heads: HeadSizes | None = None  # in layers without a window, where they differ from the others' (Gemma 4)
    # By layer, the one whose keys and values it attends to: itself, or an earlier one of its kind; None: all their own.
    kv_sources: tuple[int, ...] | None = None
    keys_are_values: bool = False  # in layers without a window one projection gives keys and values
    has_value_norm: bool = False  # RMSNorm without weights over each head of v
    has_unscaled_scores: bool = False  # products of queries and keys are not divided by sqrt(E)
    per_layer_dim: int = 0  # numbers of a token that are embedded for each layer (Gemma 4); 0: none
    per_layer_lines: int = 0  # of the tables of these embeddings, behind which token ids have the first; 0: V
    altup: AltUp | None = None
    hyper: HyperConnections | None = None
    has_layer_scalars: bool = False  # a layer's output is multiplied by a stored number
    has_wide_mlps: bool = False  # the MLP of layers that share keys and values has twice intermediate_size
    logit_cap: float | None = None  # c of c tanh(logits / c)
    score_cap: float | None = None  # the same of attention scores, before the softmax (Gemma 2)
    tie_word_embeddings: bool = False
    has_sinks: bool = False  # a learned attention sink per query head (gpt-oss); with full_heads under windows alone
    value_dim: int | None = None  # numbers of a value, where a key has more; zeros are kept behind them (MiMo)
    # Numbers of a token whose sigmoid gates the output of a head of attention: head_dim, in the checkpoint behind each
    # query head (Qwen3-Next) or apart (Trinity), 1, of a projection of its own (LFM3), or 0: none. With latents apart,
    # and value_dim or 1.
    gate_dim: int = 0
    has_softplus_gates: bool = False  # they are log(1 + e^x) in place of sigmoids (Laguna)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    latent: LatentConfig | None = None  # of latent attention, where a latent is the head of the one kv head
    index_topk: int | None = None  # tokens that an indexer chooses for a query (DSA); it is left out: all are attended
    num_mtp_layers: int = 0  # layers behind the last, which predict further tokens: a draft model, if one is wanted
    prediction_of: int = 0  # of the first of them, as a model of one layer: the layers before it; 0: of other models
    qk_norm: bool = False  # RMSNorm over each head of q and k before the rotation (Qwen3)
    norms_heads_apart: bool = False  # these norms are LayerNorms, with weights for each head (Command R+)
    norms_after_rope: bool = False  # these norms come after the rotation (Hunyuan)
    has_whole_qk_norm: bool = False  # RMSNorm over all heads of q together, and over those of k (OLMo 2)
    moe: MoEConfig | None = None  # None: every layer has one MLP
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stored: StoredWeights = field(default_factory=StoredWeights)
    table_lines: int | None = None  # of the vocabulary on this rank, with the last rank's padding; None: V
    float_tensors: tuple[str, ...] = ()  # of a rank or prediction layer: tensors that are not quantized, see TensorSpec

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_position"):  # fmt: skip
            check(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be >= 1")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        for name in ("num_layers", "num_heads", "head_dim"):
            most = 2 * MAX_DIM if self.latent else MAX_DIM
            check(getattr(self, name) <= most, f"{name} is {getattr(self, name)}; it must be <= {most}")
        check(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}; rotary embedding needs an even size")
        for name in ("rotated_layers", "windows"):
            count = self.num_layers if getattr(self, name) is None else len(getattr(self, name))
            check(count == self.num_layers, f"{name} names {count} layers; there are {self.num_layers}")
        if self.windows is not None:
            least = min((window for window in self.windows if window is not None), default=1)
            check(least >= 1, f"a sliding window is {least} tokens; it must be >= 1")
            check(self.latent is None, "latent attention with sliding windows is not supported")
        if self.recurrent_layers:
            check(self.recurrent is not None, "recurrent_layers needs recurrent")
            check(
                (self.recurrent_norms or self.norms).has_inputs and not self.is_parallel and not self.is_centered,
                "recurrent layers without norms of inputs, with a parallel MLP or with LayerNorm are not supported",
            )
        if self.has_parallel_recurrence:
            check(
                isinstance(self.recurrent, Mamba2) and len(self.recurrent_layers) == self.num_layers
                and self.mlp_layers is None and self.latent is None and not self.gate_dim and self.windows is None
                and self.is_pre_norm,
                "attention parallel to recurrence needs Mamba-2 in all layers, without latents, attention gates, "
                "sliding windows and norms of outputs",
            )  # fmt: skip
        of_head = self.head_dim if self.latent is None else self.latent.value_dim
        check(
            self.gate_dim in (0, of_head) or (self.gate_dim == 1 and not self.qkv_bias),
            f"gates of attention have {self.gate_dim} numbers a head; there must be {of_head} or, without biases of "
            "queries, 1",
        )
        check(len(self.attention_layers) > 0, "a model without any attention layer is not supported")
        if self.mlp_layers is not None:
            check(
                bool(self.recurrent_layers) and self.norms[1:] == (None, None, None),
                "layers of a single part need recurrent layers among them, and one norm each",
            )
        for name in ("short_factors", "long_factors"):
            count = len(getattr(self.rope, name))
            pairs = self.rope.rotary_dim(self.rope_dim) // 2 if self.rope.kind == "longrope" else 0
            check(count == pairs, f"rope {self.rope.kind}: {name} has {count} numbers; {pairs} pairs are rotated")
        check(
            self.multipliers.attention == 1.0 or self.rope.partial_rotary_factor == 1.0,
            "a multiplier of attention needs heads that are rotated as a whole, or not at all",
        )
        is_plain = self.multipliers == Multipliers() and self.is_pre_norm and self.has_gate
        check(is_plain or self.latent is None, "multipliers and other norms are not supported with latents")
        is_beside = self.moe is not None and self.moe.is_beside_mlp
        check(
            self.moe is None or is_beside or (self.norms.has_inputs and self.activation in ("silu", "relu2")),
            "experts without a norm of their input, GELU and xIELU are not supported",
        )
        check(
            not self.has_norm_biases
            or (self.is_centered and not (self.latent or self.has_fused_qkv or (self.moe and self.moe.num_shared))),
            "biases of norms other than LayerNorm, with shared experts, latents or fused projections are not supported",
        )
        self._check_layer_sizes()
        check(
            self.multipliers.residual == 1.0 or not self.norms.has_outputs or self.moe is None,
            "a multiplier of the residual stream with norms of outputs of experts is not supported",
        )
        check(
            self.out_norm_eps is None or (self.norms.has_outputs and not (self.moe or self.latent or self.altup)),
            "an epsilon of norms of outputs without any, with experts, latents or residual streams is not supported",
        )
        ends = (self.norms.after_attention is None) == (self.norms.after_mlp is None)
        is_alone = self.is_parallel or self.mlp_layers is not None
        check(
            (ends or self.norms_experts_alone)
            and (is_alone or (self.norms.before_attention is None) == (self.norms.before_mlp is None)),
            f"norms of a layer are at {self.norms}; attention and MLP must have the same places",
        )
        check(not (self.qk_norm and self.has_whole_qk_norm), "norms of heads exclude those of whole projections")
        check(
            not self.norms_after_rope
            or (
                self.qk_norm
                and self.rope.kind in ("default", "linear", "dynamic", "llama3")
                and self.windows is self.rotated_layers is None
            ),
            f"rope {self.rope.kind}, sliding windows or layers without rotary embedding are not supported with norms "
            "of queries and keys after the rotation",
        )
        has_others = self.norms.has_outputs or not self.norms.has_inputs or self.has_whole_qk_norm
        check(
            not (self.is_parallel or self.is_centered) or not (has_others or self.qk_norm != self.norms_heads_apart),
            "parallel attention and MLP, or LayerNorm, beside norms of outputs, queries or keys are not supported",
        )
        check(self.is_centered or not self.norms_heads_apart, "LayerNorms of heads need those of layers")
        check(
            is_alone == (self.norms.before_mlp is None) or not self.norms.has_inputs,
            f"norms of a layer are at {self.norms}; only a parallel MLP has none of its own",
        )
        if (own := self.window_rope) is not None:
            check(self.windows is not None, "window_rope needs layers with sliding windows")
            check(not own.depends_on_length, f"rope {own.kind} is not supported in layers with sliding windows")
            check(
                own.partial_rotary_factor == self.rope.partial_rotary_factor == 1.0
                or (self.widest_head == self.head_dim and own.rotary_dim(self.head_dim) % 2 == 0),
                "heads that differ in size by layer must be rotated as a whole, others in pairs",
            )
            check(
                own.is_interleaved == self.rope.is_interleaved, "heads of all layers must be rotated by the same pairs"
            )
        if self.length_scale is not None:
            check(
                (self.length_scale.is_unrotated or not (self.qk_norm or self.has_whole_qk_norm))
                and self.window_rope is None,
                "queries scaled by position beside norms of queries or a rope of sliding windows are not supported",
            )
            check(self.length_scale.original >= 1, f"length_scale is {self.length_scale}; original must be >= 1")
        rotated = self.rope.rotary_dim(self.head_dim)
        check(
            rotated % 2 == 0 and 2 <= rotated <= self.head_dim,
            f"partial_rotary_factor {self.rope.partial_rotary_factor} rotates {rotated} of the {self.head_dim} numbers "
            "of a head; it must rotate an even number of them",
        )

    def _check_layer_sizes(self) -> None:
        """ValueError for parts in which layers differ and that do not go together."""
        if (own := self.full_heads) is not None:
            has_own_ropes = self.window_rope is not None and self.windows is not None
            check(has_own_ropes and not self.latent, "full_heads needs a window_rope, and no latents")
            heads = own.num_heads or self.num_heads
            check(
                own.num_kv_heads >= 1 and heads % own.num_kv_heads == 0,
                f"num_heads ({heads}) is not a multiple of the {own.num_kv_heads} kv heads of full layers",
            )
            check(
                2 <= own.head_dim <= MAX_DIM and own.head_dim % 2 == 0,
                f"heads of full layers have {own.head_dim} numbers; it must be even, from 2 to {MAX_DIM}",
            )
        if self.kv_sources is not None:
            windows = self.layer_windows
            check(
                len(self.kv_sources) == self.num_layers
                and all(
                    source == layer
                    or (0 <= source < layer and self.kv_sources[source] == source and windows[source] == windows[layer])
                    for layer, source in enumerate(self.kv_sources)
                ),
                f"kv_sources is {self.kv_sources}; layers must share keys and values with an earlier one of their kind",
            )
        if self.has_value_norm or self.has_unscaled_scores or self.keys_are_values or self.kv_sources is not None:
            check(
                self.qk_norm and self.latent is None and not self.qkv_bias and not self.has_fused_qkv
                and not self.gate_dim and not self.recurrent_layers and not self.has_sinks,
                "norms of values, unscaled scores, shared or equal keys and values need norms of the heads of q and k, "
                "and exclude biases, gates, sinks, latents and recurrent layers",
            )  # fmt: skip
        check(
            self.value_dim is None or 2 <= self.value_dim <= self.head_dim,
            f"values have {self.value_dim} numbers; it must be 2 to {self.head_dim}, the size of a key",
        )
        if self.has_layer_ends:
            check(
                self.norms.has_outputs and self.norms.has_inputs and not self.is_parallel and not self.is_centered,
                "embeddings per layer and scalars of layers need norms before and after attention and MLP",
            )
        if (altup := self.altup) is not None:
            is_alone = not self.has_layer_scalars and self.moe is None and not self.mlp_bias
            check(bool(self.per_layer_dim) and is_alone, "residual streams need embeddings per layer and plain MLPs")
            count = len(altup.sparsities)
            check(count == self.num_layers, f"activation sparsity is given for {count} of {self.num_layers} layers")
        check(
            self.hyper is None
            or (self.is_pre_norm and self.multipliers == Multipliers() and not self.norms_experts_alone
                and not (self.altup or self.mlp_layers or self.has_parallel_recurrence or self.has_layer_ends)),
            "hyper-connections need layers of two parts, each behind a norm, without norms of outputs and multipliers",
        )  # fmt: skip
        check(
            self.per_layer_dim % 32 == 0,
            f"embeddings per layer have {self.per_layer_dim} numbers; it must be a multiple of 32",
        )
        for name, cap in (("logit_cap", self.logit_cap), ("score_cap", self.score_cap)):
            check(cap is None or cap > 0, f"{name} is {cap}; it must be over 0")
        check(self.score_cap is None or self.latent is None, "a cap of attention scores with latents is not supported")

    @property
    def stream_size(self) -> int:
        """Numbers of a token between layers: D, of each residual stream."""
        several = self.altup or self.hyper
        return self.hidden_size * (1 if several is None else several.num_streams)

    @property
    def has_uneven_layers(self) -> bool:
        """Whether layers differ in their heads of keys and values, or share these."""
        return self.kv_sources is not None or len({own[:2] for own in self.all_heads}) > 1

    def heads_of(self, layer: int) -> HeadSizes:
        return self.all_heads[0 if self.layer_windows[layer] is not None else -1]

    def has_sinks_in(self, layer: int) -> bool:
        """Whether a layer has learned attention sinks."""
        return self.has_sinks and (self.full_heads is None or self.layer_windows[layer] is not None)

    def source_of(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to."""
        return layer if self.kv_sources is None else self.kv_sources[layer]

    def inner_of(self, layer: int) -> int:
        """Inner size of a layer's MLP."""
        return self.intermediate_size * (2 if self.has_wide_mlps and self.source_of(layer) != layer else 1)

    @property
    def widest_inner(self) -> int:
        """Of the MLP of any layer."""
        return max(map(self.inner_of, range(self.num_layers)))

    @property
    def all_heads(self) -> tuple[HeadSizes, ...]:
        """The distinct sizes of the heads of layers."""
        own, full = HeadSizes(self.num_kv_heads, self.head_dim, self.num_heads), self.full_heads
        return (own,) if full is None else (own, full._replace(num_heads=full.num_heads or self.num_heads))

    @property
    def most_heads(self) -> int:
        """Query heads in the layers that have most."""
        return max(sizes.num_heads for sizes in self.all_heads)

    @property
    def has_layer_ends(self) -> bool:
        """Whether something follows a layer's MLP (Gemma 4)."""
        return bool(self.per_layer_dim) or self.has_layer_scalars

    @property
    def widest_head(self) -> int:
        """Numbers of a head in the layers whose heads are largest."""
        return max(sizes.head_dim for sizes in self.all_heads)

    @property
    def is_pre_norm(self) -> bool:
        """Whether layers are pre-norm with SiLU or without gate, one block after the other."""
        is_serial = not self.is_parallel and not self.is_centered
        return self.norms.has_inputs and not self.norms.has_outputs and is_serial and self.activation != "gelu_tanh"

    @property
    def norms_experts_alone(self) -> bool:
        """Whether no outputs are normed but those of experts (A.X K1)."""
        return self.moe is not None and self.norms.after_mlp is not None and not self.norms.has_outputs

    @property
    def has_gate(self) -> bool:
        """Whether MLPs and experts are gated."""
        return self.activation in ("silu", "gelu_tanh")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """By layer, the last tokens that a query sees, itself among them; None: all."""
        return self.windows or (None,) * self.num_layers

    @property
    def attention_layers(self) -> Sequence[int]:
        """Indices of the layers that keep keys and values."""
        if not self.recurrent_layers or self.has_parallel_recurrence:
            return range(self.num_layers)
        others = {*self.recurrent_layers, *(self.mlp_layers or ())}
        return tuple(index for index in range(self.num_layers) if index not in others)

    @property
    def full_layers(self) -> Sequence[int]:
        """Those of them that keep all tokens, up to a row's budget."""
        own = [layer for layer in self.attention_layers if self.source_of(layer) == layer]
        return tuple(layer for layer in own if self.layer_windows[layer] is None)

    @property
    def dense_layers(self) -> Sequence[int]:
        """Indices of the layers that have an MLP."""
        layers = range(self.num_layers) if self.mlp_layers is None else self.mlp_layers
        experts = () if self.moe is None or self.moe.is_beside_mlp else self.moe.layers(self.num_layers)
        return tuple(index for index in layers if index not in experts)

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that have angles, some of which may be 0."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads
