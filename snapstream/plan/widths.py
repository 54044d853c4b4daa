"""Decides how wide the matrices of a model lie in memory, from what the user said and what the checkpoint stores.

``auto`` keeps what the checkpoint stores where a CPU computes in fp32: every number of 16 bits is one of fp32, so
nothing is lost, and a step reads half the bytes. Elsewhere it is the dtype of the computation.
"""

from __future__ import annotations

from snapstream.config import EngineOptions, ModelConfig, StoredWeights, WeightForm, WeightForms
from snapstream.models.looping import problem_of_rounded_inputs
from snapstream.models.shapes import check_groups


def weight_forms(model: ModelConfig, options: EngineOptions, *, device: str, executor: str) -> WeightForms:
    """ValueError for widths that the model, the dtype or the executor cannot take."""
    forms = _matrices(model, options, device, executor)
    if options.activations == "dtype":
        return forms
    problem = problem_of_rounded_inputs(model, forms, dtype=options.dtype, device=device)
    if problem is None:
        return forms.rounding_inputs()
    if options.activations == "int8":
        raise ValueError(f"activations is 'int8': {problem}; use 'dtype'")
    return forms


def _matrices(model: ModelConfig, options: EngineOptions, device: str, executor: str) -> WeightForms:
    wanted, dtype = options.weights, options.dtype
    compiles = executor == "graph" and not device.startswith("cuda")
    keeps_stored = dtype == "float32" and not device.startswith("cuda") and not compiles
    plain = WeightForms.of((model.stored.dtype if keeps_stored else None) or dtype)
    forms = plain if wanted == "auto" else WeightForms.of(wanted)
    if model.stored.codes is not None:
        tables = (plain if wanted == "auto" else forms).tables
        forms = _stored_forms(model.stored.codes, model.stored, wanted, tables)
    if forms.layers.is_codes:
        check_groups(model, forms)
    elif forms.layers.width != dtype and dtype != "float32":
        raise ValueError(f"weights is {wanted!r} and dtype {dtype!r}; weights must be {dtype}, int8, int4 or auto")
    if compiles and forms.layers.width != dtype:
        raise ValueError(
            f"weights are {forms.layers.describe()}; executor 'graph' on a CPU compiles products of {dtype} numbers: "
            "use 'eager'"
        )
    return forms


def _stored_forms(codes: WeightForm, stored: StoredWeights, wanted: str, tables: WeightForm) -> WeightForms:
    """Layers as a quantized checkpoint has them; its embeddings, which are floats, as anywhere else."""
    if wanted not in ("auto", codes.width):
        known = "'auto'" if codes.is_blocks else f"'auto' or {codes.width!r}"
        raise ValueError(f"weights is {wanted!r}; the checkpoint has {stored.describe_codes()}: use {known}")
    return WeightForms(layers=codes, attention=stored.attention, tables=tables)
