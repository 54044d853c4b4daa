"""What a caller asks for (``request.py``, ``sampling.py``) and what it gets back (``output.py``). Plain data; no torch.

See ``engine/`` for the life of a request.
"""

from snapstream.request.output import (
    NOT_FINITE,
    Compression,
    FinishReason,
    KeptBitmap,
    Logprob,
    PrefixUse,
    RequestOutput,
    SampleOutput,
    Timings,
    Trim,
)
from snapstream.request.request import NAMESPACE_BORDER, Request
from snapstream.request.sampling import (
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUM_STOP_IDS,
    Grammar,
    GrammarKind,
    SamplingParams,
)
from snapstream.request.ticket import RowTicket

__all__ = [
    "MAX_GRAMMAR_CHARS", "MAX_LOGIT_BIAS", "MAX_LOGPROBS", "MAX_SAMPLES", "MAX_STOP_STRINGS", "MAX_STOP_TOKEN_IDS",
    "NAMESPACE_BORDER", "NOT_FINITE", "NUM_STOP_IDS", "Compression", "FinishReason", "Grammar", "GrammarKind",
    "KeptBitmap", "Logprob", "PrefixUse", "Request", "RequestOutput", "RowTicket", "SampleOutput", "SamplingParams",
    "Timings", "Trim",
]  # fmt: skip
