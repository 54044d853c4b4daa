"""Facts of the generated documents planted inside real text: a line of its own in prose, a comment in code.

Where facts stand in generated filler, whatever looks for unlike tokens finds them. In real text most tokens are unlike
their neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

from recipes.corpus import Corpus
from recipes.documents import make_document
from snapstream.assets.documents import Document, Style

CHARS_PER_TOKEN = 3.0  # of real text; a window is cut down to the tokens that are left for it
FACT_TOKENS = 40  # room for a fact with its line
FAMILIES = ("multi_number", "multi_words", "multi_uuid", "variable", "paraphrase")


def make_planted(
    corpus: Corpus,
    *,
    family: str,
    seed: str,
    count_tokens: Callable[[str], int],
    target_tokens: int,
    num_facts: int = 16,
    num_questions: int | None = None,
    style: Style | None = None,
) -> Document:
    """A document of at most about `target_tokens` tokens: a window of real text with facts at random lines of it.

    ValueError for a family that has no sentences of its own to plant.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {FAMILIES}, got {family!r}")
    rng = Random(f"planted/{family}/{seed}")
    num_facts = max(1, min(num_facts, target_tokens // (2 * FACT_TOKENS)))
    drawn = make_document(
        family=family, seed=seed, count_tokens=count_tokens, target_tokens=num_facts * FACT_TOKENS,
        num_facts=num_facts, num_questions=num_questions, style=style,
    )  # fmt: skip
    spans = {span for question in drawn.questions for span in question.spans}
    facts = [drawn.text[start:stop] for start, stop in sorted(spans)]
    room = target_tokens - sum(count_tokens(f"\n    # {fact}") for fact in facts)
    lines, mark = _window(corpus, rng, count_tokens, room)
    for fact in rng.sample(facts, len(facts)):
        place = rng.randint(0, len(lines))
        indent = re.match(r"[ \t]*", lines[place - 1] if place else "")
        lines.insert(place, (indent.group() if indent else "") + mark + fact)
    text = "\n".join(lines)
    questions = []
    for question in drawn.questions:
        found = [text.index(drawn.text[start:stop]) for start, stop in question.spans]
        own = tuple((at, at + stop - start) for at, (start, stop) in zip(found, question.spans, strict=True))
        questions.append(replace(question, spans=own))
    return Document(text=text, questions=tuple(questions))


def _window(corpus: Corpus, rng: Random, count_tokens: Callable[[str], int], room: int) -> tuple[list[str], str]:
    """Lines of real text of at most `room` tokens, and what a planted line begins with there."""
    lines: list[str] = []
    mark, num_tokens = "", 0
    for _ in range(50):  # pieces may be shorter than the window
        text, kind = corpus.window(rng, int(max(room - num_tokens, 0) * CHARS_PER_TOKEN))
        mark = "# " if kind == "code" else mark
        for line in text.split("\n"):
            num_tokens += count_tokens(f"{line}\n")
            if num_tokens > room:
                return lines, mark
            lines.append(line)
    return lines, mark
