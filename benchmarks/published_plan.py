"""Tables of what ``plan`` counts for published models: rows, what the paper's node holds, prefill, experts.

Nothing is measured: every number follows from config.json. ``python -m figures`` writes them into
docs/research/latents.md and docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.published import MODELS
from figures.markdown import table
from snapstream.config import DType, EngineOptions, ModelConfig, make_selector
from snapstream.config.values import format_bytes
from snapstream.config.weights import StoredWeights
from snapstream.models.quantization import stored_format
from snapstream.models.registry import kv_spec_of, model_config_from_dict
from snapstream.models.sharding import num_parameters, weight_bytes
from snapstream.plan.fit import resolve_chunking, weight_formats
from snapstream.plan.memory import prefill_memory
from tests.unit.models.test_registry import GPT_OSS_20B, GPT_OSS_120B, PUBLISHED

DTYPE: DType = "bfloat16"
SLOTS = {"128k": 131_072, "32k": 32_768, "8k": 8192}
PROMPT_LEN = 131_072
BATCHES = (1, 8, 64, 256)
# SnapStream, arXiv 2511.03092, table 5: 64 rows of 32k slots of DeepSeek-R1 on a node of 16 sockets, spread over them.
PAPER_ROWS, PAPER_SLOTS, PAPER_SOCKETS = 64, SLOTS["32k"], 16


def published_models() -> dict[str, ModelConfig]:
    return {
        name: replace(model_config_from_dict(settings), stored=StoredWeights(quantized=stored_format(settings)))
        for name, settings in MODELS.items()
    }


def _size(num_bytes: float) -> str:
    if num_bytes >= 1e11:
        return f"{num_bytes / 1e9:,.0f} GB"
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.3g} MB"


def rows_table() -> str:
    """Bytes of a cached token and of rows; of latents also what keys and values of every head would take."""
    lines = []
    for name, model in published_models().items():
        spec = kv_spec_of(model, DTYPE)
        heads = "-"
        if model.latent is not None:
            sizes = model.latent.query_dim + model.latent.value_dim
            heads = f"{2 * model.num_layers * model.num_heads * sizes:,}"
        rows = [_size(spec.row_bytes(slots)) for slots in SLOTS.values()]
        formats = weight_formats(model, EngineOptions(dtype=DTYPE), device="cuda")
        weights = _size(weight_bytes(model, DTYPE, formats))
        lines.append([name, f"{num_parameters(model) / 1e9:,.1f}B", weights, f"{spec.token_bytes():,}", heads, *rows])
    titles = ["model", "parameters", "weights as published", "bytes per token", "with a key and a value per head"]
    return table([*titles, *(f"row of {name} slots" for name in SLOTS)], lines) + "\n"


def node_table() -> str:
    """Rows in as many bytes as the paper's rows take."""
    v3 = model_config_from_dict(MODELS["DeepSeek-V3, R1"])
    held = PAPER_ROWS * kv_spec_of(v3, DTYPE).row_bytes(PAPER_SLOTS)
    lines = []
    for name, model in published_models().items():
        spec = kv_spec_of(model, DTYPE)
        fitting = {slots: held // spec.row_bytes(slots) for slots in SLOTS.values()}
        lines.append([name, *(f"{n:,}" if slots <= model.max_position else "-" for slots, n in fitting.items())])
    head = f"rows in {_size(held)}: {_size(held / PAPER_SOCKETS)} on each of {PAPER_SOCKETS} sockets"
    return table([head, *(f"{name} slots" for name in SLOTS)], lines) + "\n"


def prefill_table() -> str:
    """Memory of one prompt of 128k tokens beside weights and rows, on one device."""
    lines = []
    for name, model in published_models().items():
        if model.max_position < PROMPT_LEN:
            continue
        spec, selector = kv_spec_of(model, DTYPE), make_selector()
        chunk_len = resolve_chunking(model, dtype=DTYPE, device="cuda").chunk_len
        memory = prefill_memory(model, PROMPT_LEN, chunk_len=chunk_len, dtype=DTYPE, selector=selector)
        parts = (memory.hidden_bytes, spec.layer_bytes(PROMPT_LEN), spec.expanded_bytes(PROMPT_LEN),
                 memory.transient_bytes, memory.total_bytes)  # fmt: skip
        lines.append([name, *(_size(part) for part in parts), _size(model.num_layers * spec.layer_bytes(PROMPT_LEN))])
    titles = ["a prompt of 128k tokens", "hidden states", "one layer of latents", "expanded from it", "temporaries",
              "together", "latents of all layers"]  # fmt: skip
    return table(titles, lines) + "\n"


def experts_table() -> str:
    """Share of the experts that a decode step reads, if tokens choose evenly and apart."""
    lines = []
    for name, model in published_models().items():
        if model.moe is None:
            continue
        moe = model.moe
        shares = [f"{100 * moe.num_read(batch) / moe.num_experts:.3g} %" for batch in BATCHES]
        lines.append([name, f"{moe.top_k} of {moe.num_experts}", *shares])
    return table(["experts read by a step", "per token", *(f"{batch} rows" for batch in BATCHES)], lines) + "\n"


CONTEXTS = {"8k": 8192, "128k": 131_072, "1M": 1_048_576}
STATE_SLOTS = 4096
# Their sizes are the defaults of the architecture.
DEFAULTS = {"Qwen3-Next-80B-A3B": "Qwen3NextForCausalLM", "Qwen3.5-35B-A3B": "Qwen3_5MoeForCausalLM"}


def states_table() -> str:
    """What a sequence keeps in bf16: everything, by tokens of context up to the model's own, and as a row."""
    settings = {name: found for name, (found, _) in PUBLISHED.items()} | MODELS
    settings |= {"gpt-oss-20b": GPT_OSS_20B, "gpt-oss-120b": GPT_OSS_120B}
    hybrids = {name: {"architectures": [own], "max_position_embeddings": 262_144} for name, own in DEFAULTS.items()}
    lines = []
    for name, found in sorted((settings | hybrids).items(), key=lambda item: item[0].lower()):
        model = model_config_from_dict(found)
        spec = kv_spec_of(model, DTYPE)
        full = [
            format_bytes(spec.limited(tokens).row_bytes(tokens)) if tokens <= model.max_position else "-"
            for tokens in CONTEXTS.values()
        ]
        slots = min(STATE_SLOTS, model.max_position)
        row = spec.limited(model.max_position).row_bytes(slots)
        lines.append([name, f"{model.max_position:,}", *full, format_bytes(row)])
    return table(["model", "context", *(f"at {name}" for name in CONTEXTS), f"row of {STATE_SLOTS:,}"], lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "planned_rows": rows_table,
    "planned_node": node_table,
    "planned_prefill": prefill_table,
    "planned_experts": experts_table,
    "planned_states": states_table,
}
