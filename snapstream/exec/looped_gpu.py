"""Looped decode on a GPU: the first half of a step, rows to logits, as one launch of the persistent Triton kernel.

``LoopedHalves`` takes the place of eager's halves in the programs of ``cuda_graph.py``: batches are padded and steps
captured as those of ``graph`` are, and the second half, sampling, is the same code. Invariant: equal to eager but for
rounding, since the kernel carries the residual stream in fp32. ``kernels/triton/looped`` is the kernel.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snapstream.exec.cuda_graph import SAMPLERS, Capturer, GraphDecode, ProgramMaker, Programs
from snapstream.exec.eager import DecodeStep, EagerDecode, StepParts
from snapstream.exec.looped import why_not_looped_gpu
from snapstream.exec.sampling_state import SamplingNeeds
from snapstream.kernels.rows import RowPlaces
from snapstream.kernels.triton.looped.launch import ROLES, Codes, Looped, LoopedModel, Stored
from snapstream.models.decoder import Decoder


class LoopedHalves(EagerDecode):
    """Both halves of a step over the persistent state. ValueError for what the kernel cannot run."""

    def __init__(self, parts: StepParts, max_batch: int) -> None:
        super().__init__(parts)
        problem = why_not_looped_gpu(parts.decoder.config, parts.config)
        if problem is not None:
            raise ValueError(f"executor 'looped': {problem}")
        self._decoder, self._rows = parts.decoder, parts.rows
        self._looped = Looped(looped_model(parts.decoder), parts.cache.k, parts.cache.v, max_batch)

    def logits(self, rows: Tensor) -> Tensor:
        """See ``EagerDecode.logits``; overwritten by the next step."""
        state = self._rows
        positions = state.next_position[rows]  # [B]
        places = RowPlaces(rows, state.slots(rows), state.lengths(rows))
        return self._looped.run(state.last_token[rows], places, self._decoder.rope(positions, positions + 1))


def looped_model(decoder: Decoder) -> LoopedModel:
    """A decoder's sizes and stacks as the looped kernel takes them. ValueError where a matrix is neither dense nor
    codes in groups.
    """
    config, vectors = decoder.config, decoder.weights.vectors

    def stack(role: str) -> Stored:
        weight = decoder.weights.lm_head if role == "head" else decoder.weights.matrices[role]
        if weight.scales is not None and not weight.form.is_fp8:
            return Codes(weight.data, weight.scales, weight.form.bits)
        if weight.is_low_precision:
            raise ValueError(
                f"the looped kernel reads weights in {weight.dtype}, int8 and int4, and {role} is "
                f"{weight.form.describe()}"
            )
        return weight.data

    optional = ("q_norm", "k_norm", "qkv_bias", "o_bias", "gate_up_bias", "down_bias")
    stored: dict[str, Any] = {name: vectors.get(name) for name in optional} | {role: stack(role) for role in ROLES}
    return LoopedModel(
        num_layers=config.num_layers, hidden_size=config.hidden_size, inner_size=config.intermediate_size,
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        eps=config.rms_norm_eps, **{name: vectors[name] for name in ("input_norm", "post_norm", "final_norm")},
        **stored,
    )  # fmt: skip


def make_looped(
    parts: StepParts, maker: ProgramMaker | None = None, samplers: tuple[SamplingNeeds, ...] = SAMPLERS
) -> DecodeStep:
    """Programs of one kernel and a sampler; batches are padded to powers of two, each with a kernel of its own."""
    most = parts.config.max_rows
    buckets = (*(size for size in (1, 2, 4, 8) if size < most), most)
    programs = Programs(maker or Capturer(), buckets, samplers, "Compiling and capturing looped decode")
    return GraphDecode(parts, programs, LoopedHalves(parts, most))
