"""Engines over narrow weights, by name: the width of weights, and of the inputs of products in decode.

By plain calls: prefill computes with the widened weights, decode too, and with ``-a8`` every product of decode with a
layer or the head sees its input after a trip through int8, which is what looped steps multiply with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from snapstream.config import EngineConfig, ModelConfig
from snapstream.config.weights import ActivationOption, WidthOption
from snapstream.grammar import GrammarCompiler
from snapstream.start.build import MakeRunner, build_runner
from snapstream.step import Runner

SETTINGS = ("weight_width", "attention_width", "activations")  # of a stored cell, where they are not the model's own


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
    weights: WidthOption = "auto"
    activations: ActivationOption = "dtype"
    is_everywhere: bool = False  # of int4: attention too

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
        return found | ({"activations": "int8"} if self.activations == "int8" else {})


WIDTHS = {
    "auto": Width(words="fp32"),
    "int8": Width(words="int8", weights="int8"),
    "int8-a8": Width(words="int8", weights="int8", activations="int8"),
    "int4": Width(words="int4", weights="int4"),
    "int4-a8": Width(words="int4", weights="int4", activations="int8"),
    "int4-everywhere": Width(words="int4, attention too", weights="int4", is_everywhere=True),
    "int4-everywhere-a8": Width(words="int4, attention too", weights="int4", activations="int8", is_everywhere=True),
}
