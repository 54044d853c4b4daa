"""What a sample must be, computed by itself in a plain loop: the reference for what engines interleave."""

from snapstream.engine.request_state import sample_seed
from snapstream.types import FinishReason, Request, SampleOutput

VOCAB_SIZE = 12
EOS = 0
LETTERS = "$abcdefghijk"  # token i reads LETTERS[i]; the end token is special


class LetterTokenizer:
    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(LETTERS[i] for i in ids if not (skip_special_tokens and i == EOS))


class HalfLetters:
    """Token 2 is "x" with the first byte of a character, so its "x" is shown only when the sample ends."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return b"".join({0: b"", 1: b"a", 2: b"x\xe4"}[i] for i in ids).decode(errors="replace")


def run_alone(request: Request, index: int) -> SampleOutput:
    """Draw as ``fake_runner.draw_by_hash`` does until something ends the sample."""
    sampling = request.sampling
    assert sampling.seed is not None
    seed = sample_seed(sampling.seed, index)
    ids: list[int] = []
    while True:
        token = hash((request.prompt_token_ids, seed, len(ids))) % VOCAB_SIZE
        ids.append(token)
        text = LetterTokenizer().decode(ids, skip_special_tokens=sampling.skip_special_tokens)
        before = LetterTokenizer().decode(ids[:-1], skip_special_tokens=sampling.skip_special_tokens)
        if len(ids) >= sampling.min_tokens and token == EOS and not sampling.ignore_eos:
            return SampleOutput(index, before, ids, None, FinishReason.STOP, None)
        if len(ids) >= sampling.min_tokens and token in sampling.stop_token_ids:
            return SampleOutput(index, before, ids, None, FinishReason.STOP, token)
        ends = sorted((stop for stop in sampling.stop if text.endswith(stop)), key=len)
        if ends and text != before:
            cut = text if sampling.include_stop else text[: -len(ends[-1])]
            return SampleOutput(index, cut, ids, None, FinishReason.STOP, ends[-1])
        if len(ids) == sampling.max_tokens:
            return SampleOutput(index, text, ids, None, FinishReason.LENGTH, None)
