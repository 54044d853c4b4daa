"""Engines over narrow weights, by name: the width of weights, and of the inputs of products in decode.

Eager: prefill computes with the widened weights, decode too, and with ``-a8`` every product of decode with a
layer or the head sees its input after a trip through int8, which is what looped steps multiply with. On a processor
that multiplies bf16 an engine rounds what prefill multiplies to bf16 by itself. ``-auto`` is what it then does in
models whose decode rounds too: to int8 beside codes, to bf16 beside weights of bf16. ``-prefill`` is what it does in
models with latents or experts in bf16, whose decode does not. ``-all8`` rounds to int8 in prefill, too, as an engine
does where that is the fastest, ``-int16`` to int16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from snapstream.config import EngineConfig, ModelConfig
from snapstream.config.weights import QUANTIZED_BITS, ActivationOption, PrefillInputs, WeightsOption
from snapstream.grammar import GrammarCompiler
from snapstream.startup.build import MakeRunner, build_runner
from snapstream.step import Runner

# Of a stored cell, where they are not the model's own.
SETTINGS = ("weight_width", "attention_width", "activations", "prefill_inputs")


def everywhere(
    folder: Path, model: ModelConfig, config: EngineConfig, grammars: GrammarCompiler | None, progress: bool
) -> Runner:
    """A ``MakeRunner`` that gives attention the form of the other matrices of a layer."""
    assert config.weights is not None
    config = replace(config, weights=replace(config.weights, attention=None))
    return build_runner(folder, model, config, grammars, progress)


@dataclass(frozen=True, kw_only=True)
class Width:
    """One way to round."""

    words: str  # in tables
    weights: WeightsOption = "auto"
    activations: ActivationOption = "dtype"
    is_everywhere: bool = False  # of int4: attention too
    prefill_inputs: PrefillInputs | None = None  # what auto rounds to where a processor gains by it
    rounds_decode: bool = False  # to int8 beside codes, else to bf16

    @property
    def make_runner(self) -> MakeRunner:
        """How such an engine is loaded."""
        return everywhere if self.is_everywhere else build_runner

    @property
    def settings(self) -> dict[str, str]:
        """What names a stored cell, beside what it has in common with those of the model's own width."""
        found = {} if self.weights == "auto" else {"weight_width": str(self.weights)}
        if self.weights == "int4" and not self.is_everywhere:
            found["attention_width"] = "int8"
        if self.rounds_decode:
            found["activations"] = "int8" if self.weights in QUANTIZED_BITS else "bfloat16"
        return found | ({"prefill_inputs": self.prefill_inputs} if self.prefill_inputs else {})

    def check(self, config: EngineConfig) -> None:
        """ValueError where this machine does not round as the name says."""
        if config.weights is None:
            return
        if config.weights.prefill_inputs != self.prefill_inputs:
            raise ValueError(f"prefill of {self.words} weights rounds its inputs on other processors, not on this one")
        if config.weights.layers.rounds_inputs != self.rounds_decode:
            width = next(name for name, own in WIDTHS.items() if own is self)
            raise ValueError(
                f"decode of {self.words} weights rounds its inputs in some models and not in others; "
                f"this width is for {'the former' if self.rounds_decode else 'the latter'}: {width!r}"
            )


WIDTHS = {
    "auto": Width(words="fp32"),
    "bfloat16": Width(words="bf16", weights="bfloat16"),
    "bfloat16-prefill": Width(words="bf16", weights="bfloat16", activations="auto", prefill_inputs="bfloat16"),
    "bfloat16-auto": Width(
        words="bf16", weights="bfloat16", activations="auto", prefill_inputs="bfloat16", rounds_decode=True
    ),
    "bfloat16-int16": Width(words="bf16", weights="bfloat16", activations="auto", prefill_inputs="int16"),
    "int8": Width(words="int8", weights="int8"),
    "int8-a8": Width(words="int8", weights="int8", activations="int8", rounds_decode=True),
    "int8-auto": Width(words="int8", weights="int8", activations="auto", prefill_inputs="bfloat16", rounds_decode=True),
    "int8-all8": Width(words="int8", weights="int8", activations="auto", prefill_inputs="int8", rounds_decode=True),
    "int4": Width(words="int4", weights="int4"),
    "int4-a8": Width(words="int4", weights="int4", activations="int8", rounds_decode=True),
    "int4-auto": Width(words="int4", weights="int4", activations="auto", prefill_inputs="bfloat16", rounds_decode=True),
    "int4-all8": Width(words="int4", weights="int4", activations="auto", prefill_inputs="int8", rounds_decode=True),
    "int4-everywhere": Width(words="int4, attention too", weights="int4", is_everywhere=True),
    "int4-everywhere-a8": Width(
        words="int4, attention too", weights="int4", activations="int8", is_everywhere=True, rounds_decode=True
    ),
}
