"""Composes a document of a family: facts among filler, spans, questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from snapstream.assets.documents import counted, hidden, several
from snapstream.assets.documents.document import Document, Fact, Question, Style
from snapstream.assets.documents.draw import Draw
from snapstream.assets.documents.facts import FAMILIES as FACT_FAMILIES
from snapstream.assets.documents.facts import group

FAMILIES: tuple[str, ...] = (*FACT_FAMILIES, *several.FAMILIES, *counted.FAMILIES, *hidden.FAMILIES)
NUM_ANSWERS: dict[str, int] = {
    "multi_value": 4, "multi_query": 4, "recite": 16, "common_words": 5, "frequent_words": 3,
}  # fmt: skip
_LISTS = ("kv", "json")


def make_document(
    *,
    family: str,
    seed: int | str,
    count_tokens: Callable[[str], int],
    target_tokens: int,
    num_facts: int | None = None,
    num_answers: int | None = None,
    num_questions: int | None = None,
    style: Style | None = None,
) -> Document:
    """A document of at most about `target_tokens` tokens with `num_facts` facts or more, at random depths.

    Without `num_facts`, single needles and hidden numbers have one fact, key-value lists fill the document and the
    other families have 16, or as many as one question asks for if that is more. `num_questions` questions are drawn
    from the facts (all, in random order, when it is None); only within a chain of assignments do two of them share a
    fact. Facts come in groups (chains, people, the values of a key), so the last group may go over `num_facts`, never
    over the target length. `num_answers` is how many answers a question has, in the families of `NUM_ANSWERS`, which
    holds the defaults; short documents may have fewer.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {FAMILIES}, got {family!r}")
    style = style or Style()
    if style.split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', got {style.split!r}")
    if num_answers is not None and (family not in NUM_ANSWERS or num_answers < 1):
        raise ValueError(
            f"num_answers must be at least 1 and is for {tuple(NUM_ANSWERS)}, got {num_answers} for {family!r}"
        )
    num_answers = num_answers or NUM_ANSWERS.get(family, 1)
    draw = Draw(Random(f"{family}/{style.split}/{seed}"), style, style.split)
    if family in counted.FAMILIES:
        text, asked, answers = counted.make(draw, family, count_tokens, target_tokens, num_answers)
        question = Question(text=asked, answer=", ".join(answers), answers=answers, family=family, spans=())
        return Document(text=text, questions=(question,))
    separator = "\n" if family in _LISTS else " "

    def cost(sentence: str) -> int:
        return count_tokens(separator + sentence)

    if num_facts is None:
        is_one = family.startswith("single") or family in hidden.FAMILIES
        num_facts = 1 if is_one else max(1, target_tokens) if family in _LISTS else max(16, num_answers)
    facts, num_tokens = _draw_facts(draw, family, num_facts, num_answers, cost, target_tokens)
    sentences = [fact.sentence for fact in facts]
    if family in hidden.FAMILIES:
        sentences = _hide(draw, sentences, cost, target_tokens - num_tokens)
    elif family not in _LISTS:
        while True:
            sentence = draw.filler()
            num_tokens += cost(sentence)
            if num_tokens > target_tokens:
                break
            sentences.append(sentence)
        draw.rng.shuffle(sentences)

    spans: dict[str, tuple[int, int]] = {}
    start = 0
    for sentence in sentences:
        spans[sentence] = (start, start + len(sentence))
        start += len(sentence) + len(separator)
    if family in several.FAMILIES:
        facts.sort(key=lambda fact: spans[fact.sentence])
        found = several.ask(draw, family, facts, num_answers)[:num_questions]
    else:
        chosen = draw.rng.sample(facts, len(facts) if num_questions is None else min(num_questions, len(facts)))
        found = [(fact.question, fact.answer, [fact]) for fact in chosen]
    questions = tuple(
        Question(
            text=text,
            answer=answer,
            answers=tuple(fact.value for fact in wanted),
            family=wanted[0].family,
            spans=tuple(spans[sentence] for fact in wanted for sentence in (fact.sentence, *fact.needs)),
        )
        for text, answer, wanted in found
    )
    return Document(text=separator.join(sentences), questions=questions)


def _draw_facts(
    draw: Draw, family: str, num_facts: int, num_answers: int, cost: Callable[[str], int], target_tokens: int
) -> tuple[list[Fact], int]:
    """Groups of facts until there are `num_facts` or the next group does not fit, and their tokens."""
    facts: list[Fact] = []
    num_tokens = 0
    while len(facts) < num_facts:
        if family in hidden.FAMILIES:
            more = [hidden.fact(draw, family)]
        elif family in several.FAMILIES:
            more = several.group(draw, family, num_answers)
        else:
            more = group(draw, family)
        group_tokens = sum(cost(fact.sentence) for fact in more)
        if facts and num_tokens + group_tokens > target_tokens:
            break
        facts += more
        num_tokens += group_tokens
    return facts, num_tokens


def _hide(draw: Draw, sentences: Sequence[str], cost: Callable[[str], int], room: int) -> list[str]:
    """Repeated filler of at most `room` tokens with the sentences at random depths."""
    repeated = hidden.filler(draw)
    costs = [cost(sentence) for sentence in repeated]
    filler: list[str] = []
    while (room := room - costs[len(filler) % len(repeated)]) >= 0:
        filler.append(repeated[len(filler) % len(repeated)])
    for sentence in sentences:
        filler.insert(draw.rng.randint(0, len(filler)), sentence)
    return filler
