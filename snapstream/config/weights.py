"""How wide the numbers of a model lie in memory: the names that a user may give, and the bytes that follow.

A ``WeightForm`` is the form of one matrix, ``WeightForms`` those of a model. ``plan/widths.py`` decides them,
``models/shapes.py`` counts their bytes, ``models/narrow.py`` is their storage. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, cast, get_args

from snapstream.config.values import DTYPE_BYTES, DType, check

CodeWidth = Literal["int8", "int4"]
Width = Literal["float32", "bfloat16", "float16", "int8", "int4", "fp8"]  # fp8 only as a checkpoint stores it
WidthOption = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
ActivationOption = Literal["auto", "dtype", "int8"]

CODE_BITS: dict[str, int] = {"int8": 8, "int4": 4, "fp8": 8}
FP8_BLOCK = 128  # rows and columns of a block that share an fp32 scale
SCALE_BYTES = 2  # fp16
# Numbers along the input that share a scale. The smallest of the usual 32, 64 and 128: it costs half a bit per number
# against an eighth and is the most exact; and 32 numbers of a row are what a kernel's vector holds.
DEFAULT_GROUP = 32
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """How the numbers of one matrix lie in memory."""

    width: Width
    group: int = 0  # of codes: numbers along the input that share a scale; floats and blocks have none
    # Whether decode rounds what the matrix is multiplied with: beside codes to int8 too, per token and group, beside
    # bf16 to bf16.
    rounds_inputs: bool = False

    def __post_init__(self) -> None:
        check(self.width in get_args(Width), f"width is {self.width!r}; it must be one of {', '.join(get_args(Width))}")
        if self.is_codes and not self.is_blocks:
            check(self.group in GROUPS, f"group is {self.group}; it must be one of {', '.join(map(str, GROUPS))}")
        else:
            check(self.group == 0, f"group is {self.group}; {self.width} weights have no groups")
            rounds = self.rounds_inputs and self.width != "bfloat16"
            check(not rounds, f"{self.width} weights are not multiplied with rounded inputs")

    @property
    def is_codes(self) -> bool:
        """Short numbers with scales: integers in groups, or FP8 in blocks."""
        return self.width in CODE_BITS

    @property
    def is_blocks(self) -> bool:
        """FP8 with a scale per block of 128 by 128."""
        return self.width == "fp8"

    @property
    def bits(self) -> int:
        """Of a number, without its share of a scale."""
        return CODE_BITS.get(self.width) or 8 * DTYPE_BYTES[self.width]

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of a matrix ``[..., out, in]``, scales included."""
        count = prod(shape)
        if self.is_blocks:
            return (
                count + prod(shape[:-2]) * prod(-(-size // FP8_BLOCK) for size in shape[-2:]) * DTYPE_BYTES["float32"]
            )
        return count * self.bits // 8 + (count // self.group * SCALE_BYTES if self.is_codes else 0)

    def describe(self) -> str:
        """In a few words: ``int4 in groups of 32``."""
        if self.is_blocks:
            return f"fp8 in blocks of {FP8_BLOCK} by {FP8_BLOCK}"
        return f"{self.width} in groups of {self.group}" if self.is_codes else self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForms:
    """The forms of a model's matrices. Norms and biases are few: they stay in the dtype of the computation."""

    layers: WeightForm
    tables: WeightForm  # the embedding, and the output embedding
    attention: WeightForm | None = None  # the matrices around attention; None: as the other ones of a layer
    # Whether prefill rounds to bf16 what layers' matrices are multiplied with: where a CPU is faster at it.
    rounds_prefill: bool = False

    @classmethod
    def of(cls, width: str, group: int = DEFAULT_GROUP) -> WeightForms:
        """One width for all; but with ``int4`` tables and attention are int8.

        No layer can make good the errors of a table, and those of attention cost most of what rounding costs.
        """
        layers = _form(width, group)
        if not layers.is_codes:
            return cls(layers=layers, tables=layers)
        finer = _form("int8", DEFAULT_GROUP)
        return cls(layers=layers, tables=finer, attention=finer if width == "int4" else None)

    def describe(self) -> str:
        """``bfloat16``, or ``int4 in groups of 32, attention, embedding and head int8 in groups of 32``."""
        named = {"attention": self.attention, "embedding and head": self.tables}
        others: dict[str, list[str]] = {}  # names by what they are
        for name, form in named.items():
            if form is not None and form.describe() != self.layers.describe():
                others.setdefault(form.describe(), []).append(name)
        words = ", ".join([self.layers.describe(), *(f"{', '.join(names)} {form}" for form, names in others.items())])
        if self.rounds_prefill and self.layers.rounds_inputs and not self.layers.is_codes:
            return f"{words}; inputs bf16"
        words += "; inputs int8 in decode" * self.layers.rounds_inputs
        return words + "; inputs bf16 in prefill" * self.rounds_prefill

    def rounding_inputs(self) -> WeightForms:
        """The same, of which all that are codes see their inputs in int8."""
        return self._each(lambda form: replace(form, rounds_inputs=form.rounds_inputs or form.is_codes))

    def rounding_to_bf16(self) -> WeightForms:
        """The same, of which all that are bf16 see their inputs in bf16."""
        return self._each(lambda form: replace(form, rounds_inputs=form.rounds_inputs or form.width == "bfloat16"))

    def _each(self, change: Callable[[WeightForm], WeightForm]) -> WeightForms:
        attention = None if self.attention is None else change(self.attention)
        return replace(self, layers=change(self.layers), tables=change(self.tables), attention=attention)


def _form(width: str, group: int) -> WeightForm:
    return WeightForm(width=cast(Width, width), group=group if width in CODE_BITS else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """How a checkpoint stores its matrices, as far as its config.json or the headers of its files say."""

    dtype: DType | None = None  # of plain floats: of all matrices, or of those that are not codes; None: unknown
    codes: WeightForm | None = None  # of the layers' matrices, in a quantised checkpoint
    attention: WeightForm | None = None  # of those around attention, where they are other codes

    def codes_of(self, *, is_attention: bool) -> WeightForm | None:
        """The codes of a matrix of a layer; None for plain floats."""
        return (self.attention or self.codes) if is_attention else self.codes

    def describe_codes(self) -> str:
        """In a few words; only of a quantised checkpoint."""
        return describe_layers(self.codes, self.attention) if self.codes else "none"


def describe_layers(layers: WeightForm, attention: WeightForm | None) -> str:
    """``int4 in groups of 32, attention int8 in groups of 32``."""
    other = attention is not None and attention.describe() != layers.describe()
    return f"{layers.describe()}, attention {attention.describe()}" if attention and other else layers.describe()
