"""GGUF files, versions 2 and 3: header, settings as in config.json, tensors under the names of safetensors. No torch.

Invariants: what a header states is checked against the size of the file before memory is taken for it, and nothing is
executed; a broken file is a ValueError with its path. Tensors are mapped, and read slice by slice.

Quantized blocks that integers in groups of 32 hold exactly keep their values: Q4_0 as int4; Q8_0, Q5_0, IQ4_NL and Q4_0
beside them as int8. They appear here as ``pack-quantized`` tensors (``checkpoint.py``). Other types are dequantized, by
the ``gguf`` package, whose arithmetic is that of ggml.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snapstream.config import DType, ModelConfig, RopeConfig, StoredWeights, WeightFormat
from snapstream.config.model import MAX_DIM
from snapstream.models.config_json import MAX_TABLE_BYTES, check_file
from snapstream.models.tensors import ExpertNames

if TYPE_CHECKING:
    import numpy as np

SUFFIX, MAGIC, VERSIONS = ".gguf", b"GGUF", (2, 3)
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PAIRS, MAX_ENTRIES, MAX_TENSORS, MAX_TEXT_BYTES, MAX_SPLITS = 2**16, 2**23, 2**20, 2**24, 2**10
ALIGNMENT, MAX_ALIGNMENT, MAX_DIMS = 32, 2**16, 4

# Of metadata, by their number: how struct reads one.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY, _FLOAT = 8, 9, 6

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Kept = Literal["int8", "int4"]
EXACT_INT4, EXACT_INT8 = {"Q4_0"}, {"Q4_0", "Q5_0", "Q8_0", "IQ4_NL"}
GROUP = 32
DEQUANTIZED = (
    "Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S",
    "IQ1_M", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip
TYPES = (*FLOATS, "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", *DEQUANTIZED)


def is_gguf(path: Path) -> bool:
    """Whether a MODEL argument names a GGUF file."""
    return path.suffix == SUFFIX


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, read when it is asked for."""

    kind: int
    count: int
    start: int  # byte of the file


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file."""

    file: Path
    name: str
    shape: tuple[int, ...]  # as PyTorch counts: the numbers of a row last
    kind: str  # "Q4_K"
    start: int  # byte of the file
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a file states of itself."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def texts(self, name: str) -> list[str]:
        """An array of texts; ValueError if there is none."""
        return [str(one) for one in self._values(name, text=True)]

    def numbers(self, name: str) -> list[float]:
        """An array of numbers; ValueError if there is none."""
        return list(self._values(name, text=False))

    def _values(self, name: str, *, text: bool) -> list[Any]:
        found = self.metadata.get(name)
        if not isinstance(found, Array) or (found.kind == _TEXT) != text:
            raise ValueError(f"{self.file}: {name} is {_named(found)}; it must be an array of {_what(text)}")
        with _mapped(self.file) as reader:
            reader.at = found.start
            return [reader.text() if text else reader.number(found.kind) for _ in range(found.count)]


def _what(text: bool) -> str:
    return "texts" if text else "numbers"


class _Reader:
    """Reads values from the front of a file. ValueError past its end."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 0

    def unpack(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from(code, self.data, self.at)
        except struct.error:
            raise ValueError(f"{self.file} is truncated: its header ends at byte {len(self.data):,}") from None
        self.at += struct.calcsize(code)
        return value

    def number(self, kind: int) -> float:
        value = self.unpack(_NUMBERS[kind])
        return shortest(value) if kind == _FLOAT else value

    def skip(self, count: int, size: int, what: str) -> None:
        """Pass ``count`` values of at least ``size`` bytes; ValueError if the file or the limit has fewer."""
        if count > MAX_ENTRIES:
            raise ValueError(f"{self.file}: {what} has {count:,} entries; the limit is {MAX_ENTRIES:,}")
        if count * size > len(self.data) - self.at:
            raise ValueError(f"{self.file} is truncated: {what} has {count:,} entries")

    def size_of_text(self) -> int:
        size: int = self.unpack("<Q")
        if size > min(len(self.data) - self.at, MAX_TEXT_BYTES):
            raise ValueError(
                f"{self.file}: a text of the header has {size:,} bytes; {len(self.data) - self.at:,} are left, and the "
                f"limit is {MAX_TEXT_BYTES:,}"
            )
        return size

    def text(self) -> str:
        size = self.size_of_text()
        start, self.at = self.at, self.at + size
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{self.file}: a text at byte {start:,} of the header is not UTF-8") from None

    def value(self, name: str) -> Any:
        kind = self.unpack("<I")
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(self._known(kind, name))
        kind, count = self.unpack("<I"), self.unpack("<Q")
        if kind == _TEXT:
            self.skip(count, 8, name)
            array = Array(kind, count, self.at)
            for _ in range(count):
                size = self.size_of_text()
                self.at += size
        else:
            size = struct.calcsize(_NUMBERS[self._known(kind, name)])
            self.skip(count, size, name)
            array = Array(kind, count, self.at)
            self.at += count * size
        if self.at > MAX_TABLE_BYTES:
            raise ValueError(f"{self.file}: its header has more than {MAX_TABLE_BYTES:,} bytes")
        return array

    def _known(self, kind: int, name: str) -> int:
        if kind not in _NUMBERS:
            raise ValueError(f"{self.file}: {name} has the type {kind}, which GGUF does not define")
        return kind


class _mapped:
    """Maps a file for a reader."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> _Reader:
        try:
            with self.file.open("rb") as opened:
                self.data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise ValueError(f"{self.file} cannot be read: {error}") from None
        return _Reader(self.file, self.data)

    def __exit__(self, *error: object) -> None:
        self.data.close()


def shortest(value: float) -> float:
    """The number that was written as a 32-bit float: 1e-06 rather than 9.99999997475e-07."""
    rounded = float(f"{value:.7g}") if math.isfinite(value) else value
    return rounded if struct.pack("<f", value) == struct.pack("<f", rounded) else value


def _named(value: Any) -> str:
    if isinstance(value, Array):
        return f"an array of {value.count:,} {_what(value.kind == _TEXT)}"
    return f"{value!r:.80}"


def read_header(file: Path) -> Header:
    """Header of one file, cached until the file changes. ValueError, with the path, for anything else."""
    check_file(file)
    try:
        found = file.stat()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    return _read_header(file, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _read_header(file: Path, mtime: int, size: int) -> Header:
    with _mapped(file) as reader:
        magic = reader.data[:4]
        if magic != MAGIC:
            raise ValueError(f"{file} is not a GGUF file: it begins with {bytes(magic)!r}")
        reader.at = 4
        version = reader.unpack("<I")
        if version not in VERSIONS:
            raise ValueError(f"{file} is GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read")
        num_tensors, num_pairs = reader.unpack("<Q"), reader.unpack("<Q")
        if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
            raise ValueError(
                f"{file}: its header counts {num_tensors:,} tensors and {num_pairs:,} settings; the limits are "
                f"{MAX_TENSORS:,} and {MAX_PAIRS:,}"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            name = reader.text()
            if name in metadata:
                raise ValueError(f"{file}: {name[:80]} is set twice")
            metadata[name] = reader.value(name[:80])
        tensors = [_read_tensor(reader, file) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"{file}: general.alignment is {_named(alignment)}; it must be a power of two")
        start = -(-reader.at // alignment) * alignment
    return Header(file, metadata, _placed(file, tensors, start, size))


def _read_tensor(reader: _Reader, file: Path) -> Tensor:
    name, num_dims = reader.text(), reader.unpack("<I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise ValueError(f"{file}: {name[:80]} has {num_dims:,} dimensions; it must be 1 to {MAX_DIMS}")
    shape = tuple(reader.unpack("<Q") for _ in range(num_dims))[::-1]
    kind, start = reader.unpack("<I"), reader.unpack("<Q")
    type_name, block, block_bytes = _type(file, name, kind)
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(
            f"{file}: {name[:80]} has the shape {list(shape)}; rows of {type_name} must be a multiple of {block}"
        )
    return Tensor(file, name, shape, type_name, start, math.prod(shape) // block * block_bytes)


def _type(file: Path, name: str, kind: int) -> tuple[str, int, int]:
    """Name of a tensor type, numbers of a block and its bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        found = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"{file}: {name[:80]} has the tensor type {kind}, which is not known") from None
    if found.name not in TYPES:
        raise ValueError(f"{file}: {name[:80]} is stored as {found.name}; known: {', '.join(TYPES)}")
    return found.name, *GGML_QUANT_SIZES[found]


def _placed(file: Path, tensors: Sequence[Tensor], start: int, size: int) -> dict[str, Tensor]:
    """By name, with their place in the file; ValueError for a file that does not hold them."""
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name in found:
            raise ValueError(f"{file}: {tensor.name[:80]} is in it twice")
        own = replace(tensor, start=start + tensor.start)
        if own.start + own.num_bytes > size:
            raise ValueError(
                f"{file} is truncated: it has {size:,} bytes, and {tensor.name[:80]} ends at byte "
                f"{own.start + own.num_bytes:,}"
            )
        found[own.name] = own
    return found


def first_file(file: Path) -> Path:
    """The file with the settings of the model that a file is a part of."""
    split = SPLIT.fullmatch(file.name)
    return file if split is None else file.with_name(f"{split['stem']}-00001-of-{split['count']}.gguf")


def split_files(path: Path) -> list[Path]:
    """All files of the model of ``path``; ValueError for one that is not the first, and where some are missing."""
    split = SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count, stem = int(split["count"]), split["stem"]
    if not 1 <= count <= MAX_SPLITS:
        raise ValueError(f"{path} is one of {count:,} files; the limit is {MAX_SPLITS:,}")
    files = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if int(split["number"]) != 1:
        raise ValueError(f"{path} is a part of a model; give its first file, {files[0].name}")
    missing = [file.name for file in files if not file.is_file()]
    if missing and path.name not in missing:
        raise ValueError(f"{path.parent}: {len(missing)} of {count} files missing: {', '.join(missing[:3])}")
    return files


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How llama.cpp writes the models of an architecture."""

    name: str  # transformers' class
    fields: Mapping[str, str] = field(default_factory=dict)  # config.json's names of its own settings
    settings: Mapping[str, Any] = field(default_factory=dict)  # what the architecture implies
    layer_names: Mapping[str, str] = field(default_factory=dict)  # of its own tensors
    experts: ExpertNames = ExpertNames()
    is_interleaved: bool = False  # files have the rows of q and k so that pairs (0, 1), (2, 3) are rotated


_EXPERT_FIELDS = {"expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"}
ARCHITECTURES = {
    "llama": Architecture(name="LlamaForCausalLM", is_interleaved=True),
    "qwen2": Architecture(name="Qwen2ForCausalLM"),
    "qwen3": Architecture(name="Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        name="Qwen3MoeForCausalLM",
        fields={"expert_count": "num_experts", **_EXPERT_FIELDS},
        settings={"norm_topk_prob": True},  # llama.cpp computes no other
    ),
}
_MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    fields={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    layer_names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=ExpertNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2"),
    is_interleaved=True,
)  # arch "llama" too, with experts

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Read below, or without an effect on a model that is read: sizes that follow from tensors, and notes of the converter.
_OTHERS = {
    "attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned", "vocab_size",
    "tensor_data_layout", "attention.causal", "expert_count", "use_parallel_residual",
}  # fmt: skip
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
ROPE_FACTORS = "rope_freqs.weight"
_LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<part>\w+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A model in one or several files."""

    header: Header  # of the first, which has the settings
    architecture: Architecture
    tensors: Mapping[str, Tensor]  # of all, by their names in the files


def open_model(path: Path) -> Model:
    """ValueError for a broken file, an architecture that is not supported, and files that do not belong together."""
    return _joined(tuple(read_header(file) for file in split_files(path)))


@lru_cache(maxsize=16)
def _joined(headers: tuple[Header, ...]) -> Model:
    first, tensors = headers[0], dict[str, Tensor]()
    path = first.file
    kind = first.metadata.get("general.architecture")
    known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise ValueError(
            f"{path}: general.architecture is {_named(kind)}; GGUF files are read of {', '.join(ARCHITECTURES)}"
        )
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ValueError(f"{name[:80]} is in two files: {tensors[name].file.name} and {header.file.name}")
            tensors[name] = tensor
    count = first.metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise ValueError(f"{path}: split.tensors.count is {_named(count)}, and its files hold {len(tensors):,} tensors")
    if kind == "llama" and first.metadata.get("llama.expert_count"):
        known = _MIXTRAL
    return Model(header=first, architecture=known, tensors=tensors)


def settings_of(path: Path) -> dict[str, Any]:
    """The settings of a file as config.json names them. ValueError, with path and key, for those not understood."""
    model = open_model(path)
    metadata, prefix = model.header.metadata, f"{model.header.metadata['general.architecture']}."
    own = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    fields = {**_FIELDS, **model.architecture.fields}
    unknown = [name for name, value in own.items() if name not in fields and name not in _OTHERS and value]
    if unknown:
        raise ValueError(f"{path}: {prefix}{unknown[0]} is {_named(own[unknown[0]])}, which is not supported")
    settings = {name: _plain(model.header, prefix + key) for key, name in fields.items() if key in own}
    missing = [prefix + key for key, name in fields.items() if name not in settings and key in _NEEDED]
    if missing:
        raise ValueError(f"{path} lacks {missing[0]}")
    embed = _tensor(model, "token_embd.weight")
    settings |= {
        "architectures": [model.architecture.name],
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in model.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(model.header),
        **model.architecture.settings,
    }
    heads = settings.get("num_attention_heads")
    if "head_dim" not in settings and isinstance(heads, int) and heads > 0:
        settings["head_dim"] = int(settings["hidden_size"]) // heads
    _add_rope(model, own, settings)
    values = own.get("attention.value_length", settings.get("head_dim"))
    if values != settings.get("head_dim"):
        raise ValueError(
            f"{path}: {prefix}attention.value_length is {_named(values)}; keys have {settings['head_dim']}"
        )
    return settings


_NEEDED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
           "attention.layer_norm_rms_epsilon")  # fmt: skip


def _plain(header: Header, name: str) -> Any:
    """A setting; an array of equal numbers, one for each layer, is that number."""
    value = header.metadata[name]
    if not isinstance(value, Array):
        return value
    found = set(header.numbers(name))
    if len(found) != 1:
        raise ValueError(f"{header.file}: {name} differs from layer to layer, which is not supported")
    return found.pop()


def _tensor(model: Model, name: str) -> Tensor:
    if name not in model.tensors or len(model.tensors[name].shape) != 2:
        raise ValueError(f"{model.header.file} has no matrix {name}")
    return model.tensors[name]


def _add_rope(model: Model, own: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Scaling, and how many numbers of a head are rotated. A tensor of divisors is longrope of equal factors."""
    head_dim, rotated = settings.get("head_dim"), own.get("rope.dimension_count")
    if isinstance(head_dim, int) and isinstance(rotated, int) and head_dim and rotated != head_dim:
        settings["partial_rotary_factor"] = rotated / head_dim
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    if kind == "none" and factor not in (None, 0, 1):
        kind = "linear"
    context, file = settings["max_position_embeddings"], model.header.file
    if ROPE_FACTORS in model.tensors:
        if kind != "none":
            raise ValueError(f"{file}: {ROPE_FACTORS} beside rope.scaling.type {kind!r} is not supported")
        factors = _floats(model.tensors[ROPE_FACTORS])
        settings["rope_scaling"] = {
            "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "short_factor": factors,
            "long_factor": factors, "original_max_position_embeddings": context,
        }  # fmt: skip
    elif kind != "none":
        scaling = {"rope_type": kind, "factor": factor}
        if "rope.scaling.original_context_length" in own:
            scaling["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
        share = own.get("rope.scaling.attn_factor", 1.0)
        if share != 1.0:
            raise ValueError(f"{file}: rope.scaling.attn_factor is {_named(share)}; only 1 is supported")
        settings["rope_scaling"] = scaling


def _floats(tensor: Tensor) -> list[float]:
    """A short vector of fp32."""
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_DIM:
        raise ValueError(f"{tensor.file}: {tensor.name} is {tensor.kind} {list(tensor.shape)}; it must be a vector")
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.shape[0]}f", opened.read(tensor.num_bytes)))


# Tokens that end an answer, by their text, where the metadata does not name them; those of gpt-oss end a message.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
_CONTROL = 3


def end_tokens(header: Header) -> list[int]:
    """End tokens: eos, eot and eom of the metadata, and control tokens that chat templates of these models end with."""
    metadata = header.metadata
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    found = [token for token in named if isinstance(token, int)]
    if "tokenizer.ggml.tokens" in metadata and "tokenizer.ggml.token_type" in metadata:
        texts, kinds = header.texts("tokenizer.ggml.tokens"), header.numbers("tokenizer.ggml.token_type")
        control = {text: at for at, (text, kind) in enumerate(zip(texts, kinds, strict=False)) if kind == _CONTROL}
        found += [control[text] for text in _ENDS if text in control and "<|return|>" not in control]
    return list(dict.fromkeys(found))


def config_of(config: ModelConfig, path: Path) -> ModelConfig:
    """``config``, that of ``settings_of``, with what files of this kind store differently."""
    model = open_model(path)
    rope: RopeConfig = replace(config.rope, is_interleaved=model.architecture.is_interleaved)
    return replace(config, rope=rope, stored=_stored(model))


def _groups(model: Model) -> dict[str, set[str]]:
    """Tensor types of the matrices: of attention, of the rest of the layers, and of the tables."""
    found: dict[str, set[str]] = {"attention": set(), "layers": set(), "tables": set()}
    for stored, name in _names(model).items():
        if len(model.tensors[stored].shape) > 1 and not name.endswith(".gate.weight"):
            found[_group_of(name)].add(model.tensors[stored].kind)
    return found


def _group_of(name: str) -> str:
    return "tables" if name in TABLES else "attention" if ".self_attn." in name else "layers"


def _stored(model: Model) -> StoredWeights:
    """How matrices are read: those of the layers keep their values if all of them can."""
    groups = _groups(model)
    layers, attention, tables = (_exact(groups[name]) for name in ("layers", "attention", "tables"))
    if layers is None or attention is None:
        layers = attention = None
    elif tables is not None:
        tables = WeightFormat(dtype="int8", group=GROUP)
    kept = {"attention", "layers"} if layers else set()
    tables = tables if layers else None
    kept |= {"tables"} if tables else set()
    rest = set().union(*(kinds for name, kinds in groups.items() if name not in kept))
    floats, dequantized = {kind for kind in rest if kind in FLOATS}, sorted(rest - FLOATS.keys())
    if not rest:
        dtype: DType | None = None
    elif dequantized and floats <= {"F16"}:
        dtype = "float16"  # rounds them by less than 1/1000 of a step
    else:
        dtype = FLOATS[floats.pop()] if len(floats) == 1 and not dequantized else "float32"  # type: ignore[assignment]
    return StoredWeights(
        dtype=dtype, quantized=layers, attention=None if attention == layers else attention, tables=tables,
        dequantized=tuple(dequantized),
    )  # fmt: skip


def _exact(kinds: set[str]) -> WeightFormat | None:
    """The format that holds blocks of these types exactly."""
    if not kinds or not kinds <= EXACT_INT8:
        return None
    return WeightFormat(dtype="int4" if kinds <= EXACT_INT4 else "int8", group=GROUP)


def _names(model: Model) -> dict[str, str]:
    """Names as in safetensors by those of the file; those not known stay as they are."""
    layers = {**_LAYER_NAMES, **model.architecture.layer_names}
    found = {}
    for stored in model.tensors:
        if stored == ROPE_FACTORS:
            continue
        part = _LAYER_TENSOR.fullmatch(stored)
        outer, _, kind = stored.rpartition(".")
        if part is not None and part["part"] in layers:
            found[stored] = f"model.layers.{int(part['layer'])}.{layers[part['part']]}.{part['kind']}"
        elif outer in _OUTER_NAMES and kind == "weight":
            found[stored] = f"{_OUTER_NAMES[outer]}.{kind}"
        else:
            found[stored] = stored
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor under a name of safetensors: the numbers of a stored one, or its quantized values."""

    tensor: Tensor
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    part: Literal["numbers", "codes", "scales", "shape"] = "numbers"
    bits: int = 0  # of codes
    expert: int | None = None  # of a stored stack, the only one


def views(path: Path) -> dict[str, View]:
    """Every tensor of a model by the name that safetensors have."""
    return _views(open_model(path))


@lru_cache(maxsize=16)
def _views(model: Model) -> dict[str, View]:
    stored, found = _stored(model), dict[str, View]()
    for name, tensor, expert in _tensors(model):
        shape = tensor.shape if expert is None else tensor.shape[1:]
        forms = {"tables": stored.tables, "attention": stored.attention or stored.quantized, "layers": stored.quantized}
        form = forms[_group_of(name)] if len(shape) == 2 and tensor.kind not in FLOATS else None
        if form is None:
            dtype = tensor.kind if tensor.kind in FLOATS else "F32"
            found[name] = View(tensor=tensor, shape=shape, dtype=dtype, expert=expert)
            continue
        rows, columns = shape
        own = {
            "_packed": ("codes", (rows, columns * form.bits // 32), "I32"),
            "_scale": ("scales", (rows, columns // GROUP), "F16"),
            "_shape": ("shape", (2,), "I64"),
        }
        for suffix, (part, size, dtype) in own.items():
            found[name + suffix] = View(
                tensor=tensor, shape=size, dtype=dtype, part=part, bits=form.bits, expert=expert  # type: ignore[arg-type]
            )  # fmt: skip
    return found


def _tensors(model: Model) -> Iterator[tuple[str, Tensor, int | None]]:
    """Names as in safetensors, and which expert of a stored stack each is."""
    names = model.architecture.experts
    projections = {"ffn_gate_exps": names.gate, "ffn_up_exps": names.up, "ffn_down_exps": names.down}
    for stored, name in _names(model).items():
        tensor, part = model.tensors[stored], _LAYER_TENSOR.fullmatch(stored)
        if part is None or part["part"] not in projections or len(tensor.shape) != 3 or part["kind"] != "weight":
            yield name, tensor, None
            continue
        for expert in range(tensor.shape[0]):
            prefix = f"model.layers.{int(part['layer'])}.{names.prefix}.experts.{expert}"
            yield f"{prefix}.{projections[part['part']]}.weight", tensor, expert


_ROWS_AT_A_TIME = 2**20  # numbers that are dequantized at once


class Shard:
    """One mapped file, read as ``safetensors.safe_open`` is; numbers are numpy's, bf16 as uint16."""

    def __init__(self, file: Path) -> None:
        import numpy

        self.file, self._views = file, views(first_file(file))
        self._data: np.ndarray[Any, Any] = numpy.memmap(file, dtype=numpy.uint8, mode="c")

    def offset_keys(self) -> list[str]:
        """In the order of the file."""
        own = (name for name, view in self._views.items() if view.tensor.file == self.file)
        return sorted(own, key=lambda name: self._views[name].tensor.start)

    def read(self, name: str, place: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """A slice of a tensor."""
        import numpy

        view = self._views[name]
        tensor = view.tensor
        if view.part == "shape":
            shape = tensor.shape if view.expert is None else tensor.shape[1:]
            return numpy.array(shape, dtype=numpy.int64)[place]
        data = self._data[tensor.start : tensor.start + tensor.num_bytes].reshape(*tensor.shape[:-1], -1)
        data = data if view.expert is None else data[view.expert]
        *rows, columns = place
        data = data[tuple(rows)]
        if view.part == "numbers":
            return numbers_of(data, tensor.kind)[..., columns]
        scales, values = blocks_of(data, tensor.kind)
        if view.part == "scales":
            return scales[..., columns]
        codes = packed_codes(values, view.bits)
        return codes.reshape(*data.shape[:-1], -1).view(numpy.int32)[..., columns]


def numbers_of(data: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Rows of bytes ``[..., bytes]`` as floats; bf16 as uint16."""
    import numpy

    if kind in FLOATS:
        dtypes = {"F32": numpy.float32, "F16": numpy.float16, "BF16": numpy.uint16}
        return numpy.ascontiguousarray(data).view(dtypes[kind])
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    own = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[own]
    rows = data.reshape(-1, data.shape[-1])
    columns = data.shape[-1] // block_bytes * block
    out = numpy.empty((len(rows), columns), dtype=numpy.float32)
    step = max(_ROWS_AT_A_TIME // columns, 1)
    with numpy.errstate(all="ignore"):  # what is not finite is refused when all of it is read
        for start in range(0, len(rows), step):
            out[start : start + step] = dequantize(numpy.ascontiguousarray(rows[start : start + step]), own)
    return out.reshape(*data.shape[:-1], columns)


# Values of IQ4_NL by their code.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def blocks_of(data: np.ndarray[Any, Any], kind: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Scales ``[..., n]`` fp16 and whole numbers ``[..., n, 32]`` int8 of rows of n blocks."""
    import numpy

    size = {"Q8_0": 34, "Q4_0": 18, "IQ4_NL": 18, "Q5_0": 22}[kind]
    blocks = numpy.ascontiguousarray(data).reshape(*data.shape[:-1], -1, size)
    scales = numpy.ascontiguousarray(blocks[..., :2]).view(numpy.float16)[..., 0]
    rest = blocks[..., 2:]
    if kind == "Q8_0":
        return scales, rest.view(numpy.int8)
    nibbles = rest[..., -16:]  # the first half of the numbers in the low halves of the bytes
    codes = numpy.concatenate((nibbles & 15, nibbles >> 4), -1)
    if kind == "IQ4_NL":
        return scales, numpy.array(_IQ4_NL, dtype=numpy.int8)[codes]
    if kind == "Q5_0":
        high = numpy.unpackbits(rest[..., :4], axis=-1, bitorder="little")
        return scales, (codes | high << 4).astype(numpy.int8) - numpy.int8(16)
    return scales, codes.astype(numpy.int8) - numpy.int8(8)


def packed_codes(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Whole numbers as unsigned codes in the order of ``kernels/groups.py``, uint8."""
    import numpy

    codes = (values.astype(numpy.int16) + 2 ** (bits - 1)).astype(numpy.uint8)
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
