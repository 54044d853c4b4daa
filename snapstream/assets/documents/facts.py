"""Families whose questions have one answer each: a sentence states it, or a chain of sentences."""

from __future__ import annotations

from collections.abc import Sequence

from snapstream.assets.documents.document import Fact
from snapstream.assets.documents.draw import Draw
from snapstream.assets.documents.words import JSON_QUESTIONS, KV_QUESTIONS, RELATIONS, UUID_FACT, VARIABLE_QUESTIONS

FAMILIES = (
    "single_number", "single_words", "multi_number", "multi_words", "kv", "variable", "paraphrase", "mixed",
    "single_uuid", "multi_uuid", "json",
)  # fmt: skip


def _ask(draw: Draw, templates: Sequence[str], key: str) -> str:
    if draw.rng.random() < draw.style.terse:
        return f"And {key}?"
    return draw.rng.choice(templates).format(k=key)


def needle(draw: Draw, is_number: bool, family: str) -> list[Fact]:
    """One fact in the wording that this document uses throughout."""
    sentence, questions = draw.number_fact if is_number else draw.words_fact
    key, value = draw.key(), draw.number() if is_number else draw.words()
    return [Fact(sentence.format(k=key, v=value), key, value, value, _ask(draw, questions, key), family)]


def pair(draw: Draw) -> list[Fact]:
    """One key-value line."""
    key, value = draw.key(), draw.number() if draw.rng.random() < 0.7 else draw.words()
    sentence, question = draw.kv_line.format(k=key, v=value), _ask(draw, KV_QUESTIONS, key)
    return [Fact(sentence, key, value, value, question, "kv")]


def identity(draw: Draw, family: str) -> list[Fact]:
    """One fact with an identifier."""
    sentence, questions = UUID_FACT
    key, value = draw.key(), draw.uuid()
    return [Fact(sentence.format(k=key, v=value), key, value, value, _ask(draw, questions, key), family)]


def member(draw: Draw) -> list[Fact]:
    """One line of a JSON object."""
    key, value = draw.key(), draw.number()
    question = draw.rng.choice(JSON_QUESTIONS).format(k=key)
    return [Fact(f'  "{key}": {value},', key, value, value, question, "json")]


def chain(draw: Draw) -> list[Fact]:
    """A chain of assignments; only its last variable has a number. The answer walks the chain."""

    def new_name() -> str:
        return draw.coin() if draw.rng.random() < draw.style.coined else draw.rng.choice(draw.nouns)

    names = [draw.unused(new_name) for _ in range(draw.rng.randint(1, draw.style.max_depth))]
    value = draw.number()
    targets = [*names[1:], value]
    sentences = [f"Let {name} = {target}." for name, target in zip(names, targets, strict=True)]
    facts = []
    for i, name in enumerate(names):
        question = _ask(draw, VARIABLE_QUESTIONS, name)
        answer = " = ".join(targets[i:])
        needs = tuple(sentences[i + 1 :])
        facts.append(Fact(sentences[i], name, answer, value, question, "variable", needs))
    return facts


def persona(draw: Draw) -> list[Fact]:
    """Two or three facts about one person, each asked in other words than it is stated in."""
    key, facts = draw.person(), []
    for is_number, statements, questions in draw.rng.sample(RELATIONS, draw.rng.randint(2, 3)):
        value = draw.number() if is_number else draw.words()
        sentence = draw.rng.choice(statements).format(k=key, v=value)
        question = draw.rng.choice(questions).format(k=key)
        facts.append(Fact(sentence, key, value, value, question, "paraphrase"))
    return facts


def group(draw: Draw, family: str) -> list[Fact]:
    """The next group of facts for a document of `family`."""
    if family == "mixed":
        family = draw.rng.choice(("multi_number", "multi_words", "variable", "paraphrase"))
    if family == "kv":
        return pair(draw)
    if family == "variable":
        return chain(draw)
    if family == "paraphrase":
        return persona(draw)
    if family == "json":
        return member(draw)
    if family.endswith("uuid"):
        return identity(draw, family)
    return needle(draw, family.endswith("number"), family)
