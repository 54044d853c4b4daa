"""Formats of a model's weights. No torch.

``plan/fit.py`` decides them, ``models/sharding.py`` counts their bytes, ``models/matrix.py`` is their storage.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, cast, get_args

from snapstream.config.values import DTYPE_BYTES, DType, check, check_choice

QuantizedDType = Literal["int8", "int4"]
# Those from uint4 on only as checkpoints have them.
WeightDType = Literal[
    "float32", "bfloat16", "float16", "int8", "int4", "uint4", "fp8", "mxfp4", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs",
]  # fmt: skip
WeightsOption = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
ActivationOption = Literal["auto", "dtype", "int8"]
PrefillInputs = Literal["bfloat16", "int8", "int16"]

QUANTIZED_BITS: dict[str, int] = {
    "int8": 8, "int4": 4, "uint4": 4, "fp8": 8, "mxfp4": 4, "q2_k": 2, "q3_k": 3, "q4_k": 4, "q5_k": 5, "q6_k": 6,
    "iq2_xxs": 4, "iq2_xs": 4, "iq2_s": 4, "iq3_xxs": 4, "iq3_s": 4, "iq4_xs": 4,
}  # fmt: skip
# K-quants and IQ types of GGUF files: numbers along the input that share a scale, an integer times a factor of a block.
K_GROUPS = {
    "q2_k": 16, "q3_k": 16, "q4_k": 32, "q5_k": 32, "q6_k": 16,
    "iq2_xxs": 32, "iq2_xs": 16, "iq2_s": 16, "iq3_xxs": 32, "iq3_s": 32, "iq4_xs": 32,
}  # fmt: skip
K_BLOCK = 256
# What codes of IQ types stand for, times a power of two. Files have those of two and three bits as places in a list of
# vectors of eight or four magnitudes, and signs.
IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL, too
_IQ2_NUMBERS = (-43, -25, -8, 8, 25, 43)
IQ_NUMBERS: dict[str, tuple[int, ...]] = {
    "iq2_xxs": _IQ2_NUMBERS, "iq2_xs": _IQ2_NUMBERS, "iq2_s": _IQ2_NUMBERS, "iq4_xs": IQ4_NUMBERS,
    "iq3_xxs": (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": (-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15),
}  # fmt: skip
IQ_UNITS = {"iq2_xxs": 1 / 8, "iq2_xs": 1 / 8, "iq2_s": 1 / 8, "iq3_xxs": 1 / 4, "iq3_s": 1.0, "iq4_xs": 1.0}
FP8_BLOCK = 128  # rows and columns of a block that share an fp32 scale
SCALE_BYTES = 2  # fp16
MXFP4_GROUP = 32  # numbers along the input that share a power of two
# Numbers along the input that share a scale. The smallest of the usual 32, 64 and 128: most exact, at half a bit per
# number against an eighth; and 32 numbers of a row fill a kernel's vector.
DEFAULT_GROUP = 32
GROUPS = (32, 64, 128)
INT16_GROUP = 32  # numbers along the input that share a scale in products of int16


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How one matrix is stored."""

    dtype: WeightDType
    group: int = 0  # of integers and FP4: numbers along the input that share a scale, and a minimum if there are any
    # Whether decode rounds the inputs of its GEMMs: with quantized values to int8, per token and group, with bf16 to
    # bf16.
    rounds_inputs: bool = False

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, get_args(WeightDType))
        if self.is_quantized and not self.is_fp8:
            known = (K_GROUPS[self.dtype],) if self.is_k_quant else GROUPS
            check(self.group in known, f"group is {self.group}; it must be one of {', '.join(map(str, known))}")
        else:
            check(self.group == 0, f"group is {self.group}; {self.dtype} weights have no groups")
            rounds = self.rounds_inputs and self.dtype != "bfloat16"
            check(not rounds, f"{self.dtype} weights are not multiplied with rounded inputs")

    @property
    def is_quantized(self) -> bool:
        """Short numbers with scales: integers in groups, or FP8 in blocks."""
        return self.dtype in QUANTIZED_BITS

    @property
    def is_fp8(self) -> bool:
        """FP8 with a scale per block of 128 by 128."""
        return self.dtype == "fp8"

    @property
    def is_mxfp4(self) -> bool:
        """FP4 with a power of two per 32 numbers (OCP Microscaling Formats 1.0, section 5.3)."""
        return self.dtype == "mxfp4"

    @property
    def is_uint4(self) -> bool:
        """Integers of four bits without a sign, with a scale and a minimum per group."""
        return self.dtype == "uint4"

    @property
    def is_k_quant(self) -> bool:
        """Integers as K-quants of GGUF files have them, with scales of eight bits."""
        return self.dtype in K_GROUPS

    @property
    def has_minimums(self) -> bool:
        """Whether groups have a minimum as well as a scale."""
        return self.dtype in ("uint4", "q2_k", "q4_k", "q5_k")

    @property
    def has_packed_scales(self) -> bool:
        """Whether the scale and the minimum of a group are one byte."""
        return self.dtype == "q2_k"

    @property
    def block(self) -> int:
        """Numbers along the input that cannot be stored apart."""
        return K_BLOCK if self.is_k_quant else self.group

    @property
    def factor_bytes(self) -> int:
        """Of a block of a K-quant: the fp16 factors of its scales and minimums, before these."""
        return SCALE_BYTES * (1 + self.has_minimums)

    @property
    def scale_bytes(self) -> int:
        """Of a block: scales, minimums and factors."""
        if self.is_k_quant:
            return self.factor_bytes + K_BLOCK // self.group * (1 + (self.has_minimums and not self.has_packed_scales))
        return 1 if self.is_mxfp4 else SCALE_BYTES * (1 + self.has_minimums)

    def scales_shape(self, num_in: int) -> tuple[int, ...]:
        """Of the scales of a row of ``num_in`` numbers in groups."""
        return (num_in // self.block, *((self.scale_bytes,) if self.is_k_quant else ()))

    @property
    def bits(self) -> int:
        """Of a number, without its share of a scale."""
        return QUANTIZED_BITS.get(self.dtype) or 8 * DTYPE_BYTES[self.dtype]

    def rounded(self, inputs: PrefillInputs | None) -> PrefillInputs | None:
        """What prefill rounds inputs of such a matrix to where ``WeightFormats.prefill_inputs`` is ``inputs``."""
        if inputs == "bfloat16":
            return inputs if self.dtype in ("bfloat16", "int8", "int4") else None
        if self.group:
            return "int8" if inputs == "int8" else None
        return "int16" if inputs is not None and self.dtype in ("bfloat16", "float16", "fp8") else None

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of a matrix ``[..., out, in]``, scales included."""
        count = prod(shape)
        if self.is_fp8:
            return (
                count + prod(shape[:-2]) * prod(-(-size // FP8_BLOCK) for size in shape[-2:]) * DTYPE_BYTES["float32"]
            )
        return count * self.bits // 8 + (count // self.block * self.scale_bytes if self.is_quantized else 0)

    def describe(self) -> str:
        """In a few words: ``int4 in groups of 32``."""
        if self.is_fp8:
            return f"fp8 in blocks of {FP8_BLOCK} by {FP8_BLOCK}"
        return f"{self.dtype} in groups of {self.group}" if self.group and not self.is_k_quant else self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormats:
    """Formats of a model's matrices. Norms and biases are few: they stay in the dtype of the computation."""

    layers: WeightFormat
    tables: WeightFormat  # the embedding, and the output embedding
    attention: WeightFormat | None = None  # the matrices around attention; None: as the other ones of a layer
    # What prefill rounds inputs of the layers' GEMMs to, where a CPU is faster at it: int8 per token and group, and
    # with weights of 16 bits and FP8 int16, per token and 32 numbers, as it rounds these weights; int16: that alone.
    prefill_inputs: PrefillInputs | None = None
    own: tuple[WeightFormat, ...] = ()  # that matrices of the checkpoint keep, see ``StoredWeights.own``

    @classmethod
    def of(cls, width: str, group: int = DEFAULT_GROUP) -> WeightFormats:
        """One format for all; but with ``int4`` tables and attention are int8, whose errors cost most."""
        layers = _form(width, group)
        if not layers.is_quantized:
            return cls(layers=layers, tables=layers)
        finer = _form("int8", DEFAULT_GROUP)
        return cls(layers=layers, tables=finer, attention=finer if width == "int4" else None)

    @property
    def has_groups(self) -> bool:
        """Whether matrices of the layers are integers, or FP4, in groups."""
        return any(form.group for form in (self.layers, *self.own))

    @property
    def decode_inputs(self) -> Literal["bfloat16", "int8"] | None:
        """What decode rounds inputs of the layers' GEMMs to."""
        rounding = [form for form in (self.layers, *self.own) if form.rounds_inputs]
        return "int8" if any(form.group for form in rounding) else "bfloat16" if rounding else None

    def describe(self) -> str:
        """``bfloat16``, or ``int4 in groups of 32, attention, embedding and head int8 in groups of 32``."""
        named = {"attention": self.attention, "embedding and head": self.tables}
        others: dict[str, list[str]] = {}  # names by what they are
        for name, form in named.items():
            if form is not None and form.describe() != self.layers.describe():
                others.setdefault(form.describe(), []).append(name)
        kept = " and ".join(form.describe() for form in self.own)
        first = f"{kept} as stored, other layers {self.layers.describe()}" if kept else self.layers.describe()
        words = ", ".join([first, *(f"{', '.join(names)} {form}" for form, names in others.items())])
        short = {"bfloat16": "bf16", None: ""}
        prefill, decode = (short.get(inputs, str(inputs)) for inputs in (self.prefill_inputs, self.decode_inputs))
        if prefill == decode:
            return f"{words}; inputs {decode}" if decode else words
        parts = {"decode": decode, "prefill": prefill}
        return words + "".join(f"; inputs {inputs} in {phase}" for phase, inputs in parts.items() if inputs)

    def rounding_inputs(self) -> WeightFormats:
        """The same; quantized matrices round their inputs to int8."""
        return self._each(lambda form: replace(form, rounds_inputs=form.rounds_inputs or form.is_quantized))

    def rounding_to_bf16(self) -> WeightFormats:
        """The same; bf16 matrices round their inputs to bf16."""
        return self._each(lambda form: replace(form, rounds_inputs=form.rounds_inputs or form.dtype == "bfloat16"))

    def _each(self, change: Callable[[WeightFormat], WeightFormat]) -> WeightFormats:
        attention = None if self.attention is None else change(self.attention)
        own = tuple(map(change, self.own))
        return replace(self, layers=change(self.layers), tables=change(self.tables), attention=attention, own=own)


def _form(width: str, group: int) -> WeightFormat:
    return WeightFormat(dtype=cast(WeightDType, width), group=group if width in QUANTIZED_BITS else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the files of a quantized checkpoint hold a matrix, where its groups are not those of ``WeightFormat``.

    A number is ``(value - zero) * scale``, of the zero and the scale of its group.
    """

    layout: Literal["gptq", "awq", "packed", "int8", "fp8"]  # the last three: of compressed-tensors
    bits: int
    group: int = 0  # numbers along the input that share a scale; 0: a row
    has_zeros: bool = False
    has_order: bool = False  # a table says the group of each column (activation order)
    zero_shift: int = 0  # what is added to stored zeros

    def describe(self) -> str:
        """In a few words, for the user."""
        names = {"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8 with a scale per row"}
        words = names.get(self.layout, f"int{self.bits}")
        return words + " with zero points" * self.has_zeros + " in activation order" * self.has_order


_EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")


def stack_name(name: str) -> str:
    """The name of a checkpoint tensor without the number of its expert."""
    return _EXPERT.sub("", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """How a checkpoint stores its matrices, as far as its config.json or the headers of its files say."""

    dtype: DType | None = None  # of floats: of all matrices, or of those that are not quantized; None: unknown
    quantized: WeightFormat | None = None  # of the layers' matrices, in a quantised checkpoint
    attention: WeightFormat | None = None  # of those around attention, where they differ
    tables: WeightFormat | None = None  # of the embedding and the output embedding, if they are quantized too
    packing: Packing | None = None  # of the layers' matrices in the files; None: as ``quantized``
    dequantized: tuple[str, ...] = ()  # names of quantized formats that are read as floats
    # Formats of single matrices where ``quantized`` or ``tables`` is None: each with ``stack_name`` of those in it; and
    # the names among ``dequantized`` that are kept in them.
    own: tuple[tuple[WeightFormat, frozenset[str]], ...] = ()
    in_own: tuple[str, ...] = ()
    has_one_scale: bool = False  # of FP8: for a matrix, in place of one for each block
    has_float_dense: bool = False  # matrices with ``TensorSpec.is_dense`` are floats beside quantized ones

    def format_of(self, *, is_attention: bool) -> WeightFormat | None:
        """The quantized format of a matrix of a layer; None for floats."""
        is_float = self.quantized is not None and self.quantized.is_mxfp4  # attention of a model with such experts
        return (self.attention or (None if is_float else self.quantized)) if is_attention else self.quantized

    def own_format(self, name: str) -> WeightFormat | None:
        """Of ``own``, by the name of a checkpoint tensor."""
        own = stack_name(name) if self.own else name
        return next((form for form, names in self.own if own in names), None)

    def dequantized_in(self, formats: WeightFormats) -> tuple[str, ...]:
        """Names of the quantized formats that are read as floats, or to be quantized again, if matrices are kept in
        ``formats``.
        """
        return tuple(name for name in self.dequantized if not formats.own or name not in self.in_own)

    def describe_quantized(self) -> str:
        """In a few words; only of a quantised checkpoint."""
        return describe_layers(self.quantized, self.attention) if self.quantized else ", ".join(self.dequantized)


def describe_layers(layers: WeightFormat, attention: WeightFormat | None) -> str:
    """``int4 in groups of 32, attention int8 in groups of 32``."""
    other = attention is not None and attention.describe() != layers.describe()
    return f"{layers.describe()}, attention {attention.describe()}" if attention and other else layers.describe()
