"""Families whose questions have several answers, each a fact in prose (RULER's multi-value and multi-query).

`multi_value` states several values of one key in different places and asks for all of them. `multi_query` and
`recite` name several keys in the question; the answer opens with the words before the first of them and says each key
again before its value, because that is how a small model finds its place in the list and keeps it. `recite` names many,
so that its answer is several times a small ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from snapstream.assets.documents.document import Fact
from snapstream.assets.documents.draw import Draw
from snapstream.assets.documents.facts import needle
from snapstream.assets.documents.words import NUMBER_NOUNS, SEVERAL_QUESTIONS

FAMILIES = ("multi_value", "multi_query", "recite")


def group(draw: Draw, family: str, num_answers: int) -> list[Fact]:
    """The next facts of a document: one key with `num_answers` values, or one key with one."""
    facts = needle(draw, True, family)
    for _ in range(num_answers - 1 if family == "multi_value" else 0):
        value = draw.number()
        sentence = draw.number_fact[0].format(k=facts[0].key, v=value)
        facts.append(Fact(sentence, facts[0].key, value, value, "", family))
    return facts


def ask(draw: Draw, family: str, facts: Sequence[Fact], num_answers: int) -> list[tuple[str, str, list[Fact]]]:
    """Questions as (text, answer, facts). `facts` are in the order of the document, and so are a key's values."""
    if family == "multi_value":
        by_key: dict[str, list[Fact]] = {}
        for fact in facts:
            by_key.setdefault(fact.key, []).append(fact)
        asked = draw.rng.sample(list(by_key.values()), len(by_key))
    else:
        shuffled = draw.rng.sample(facts, len(facts))
        num_questions = max(1, len(facts) // num_answers)
        asked = [shuffled[i * num_answers : (i + 1) * num_answers] for i in range(num_questions)]
    nouns = NUMBER_NOUNS[draw.number_fact[0]]
    questions = []
    for wanted in asked:
        keys = ", ".join(dict.fromkeys(fact.key for fact in wanted))
        text = draw.rng.choice(SEVERAL_QUESTIONS).format(nouns=nouns, k=keys)
        if family == "multi_value":
            answer = ", ".join(fact.value for fact in wanted)
        else:
            answer = f"{nouns} " + ", ".join(f"{fact.key} {fact.value}" for fact in wanted)
        questions.append((text, answer, wanted))
    return questions
