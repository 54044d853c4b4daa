"""More families of generated documents than the package needs: for training and for evaluation.

    json                          a JSON object of names and numbers, one to a line
    mixed                         numbers, words, assignments and facts about people in one document
    multi_value                   several values of each key in different places; all of them are wanted (RULER)
    multi_query                   several keys are asked at once (RULER)
    recite                        many keys are asked at once: an answer several times as long as a small ring
    common_words, frequent_words  the words that occur most often in a list (RULER): every word counts
    passkey, number_string        a number of 5 or 10 digits in sentences that repeat (InfiniteBench)

The answer to ``multi_query`` and ``recite`` opens with the words before the first key and repeats each key before its
value: that is how a small model finds its place in the list. The common and frequent words that are asked
for belong to the split, and none is part of another, so that containment means the word itself.
``snapstream/assets/documents.py`` has the other families, and the invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from snapstream.assets import documents
from snapstream.assets.documents import (
    NUMBER_FACTS,
    Document,
    Draw,
    Fact,
    Question,
    Style,
    about,
    draw_facts,
    mix_with_filler,
    needle,
    single_questions,
    spans_of,
)

JSON_QUESTIONS: tuple[str, ...] = ('What is the value of "{k}"?', 'Look up "{k}".')
# Families with several answers. {nouns} is what a number fact calls its values, in the plural.
NUMBER_NOUNS: dict[str, str] = {
    NUMBER_FACTS[0][0]: "codes for",
    NUMBER_FACTS[1][0]: "numbers of",
    NUMBER_FACTS[2][0]: "tickets of",
}
SEVERAL_QUESTIONS: tuple[str, ...] = ("What are all the {nouns} {k}?", "List all {nouns} {k}.")
COMMON_QUESTIONS: tuple[str, ...] = ("What are the {n} most common words?", "List the {n} most common words.")
FREQUENT_QUESTIONS: tuple[str, ...] = (
    "Which {n} words appear most often?",
    "List the {n} words that appear most often.",
)
# family: (digits, sentence, question)
HIDDEN_FACTS: dict[str, tuple[int, str, str]] = {
    "passkey": (5, "The secret key is {v}, and {v} is the secret key.", "What is the secret key?"),
    "number_string": (10, "The long number is {v}, and {v} is the long number.", "What is the long number?"),
}


def member(draw: Draw) -> list[Fact]:
    """One line of a JSON object."""
    key, value = draw.key(), draw.number()
    question = draw.rng.choice(JSON_QUESTIONS).format(k=key)
    return [Fact(f'  "{key}": {value},', key, value, value, question, "json")]


HIDDEN_FAMILIES = tuple(HIDDEN_FACTS)
REPEATED_SENTENCES = 4  # sentences that the filler repeats


def hidden_fact(draw: Draw, family: str) -> Fact:
    """The sentence that hides the number; the document asks for nothing else."""
    digits, sentence, question = HIDDEN_FACTS[family]
    low = 10 ** (digits - 1)
    value = draw.from_split(lambda: str(draw.rng.randrange(low, 10 * low)))
    return Fact(sentence.format(v=value), "", value, value, question, family)


def repeated_filler(draw: Draw) -> list[str]:
    """The sentences to repeat."""
    return [draw.filler() for _ in range(REPEATED_SENTENCES)]


SEVERAL_FAMILIES = ("multi_value", "multi_query", "recite")


def several_group(draw: Draw, family: str, num_answers: int) -> list[Fact]:
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


COUNTED_FAMILIES = ("common_words", "frequent_words")
COMMON_SHARE = 0.04  # of the words in a list, per common word
RARE_RATIO = 10  # a common word occurs so many times as often as another (RULER: 30 and 3)
ZETA_EXPONENT = 2.0  # of the frequent words' ranks (RULER: 2.0)


def _distinct(draw: Draw, word: Callable[[], str], count: int) -> list[str]:
    """Words of the split, none of them part of another."""
    found: list[str] = []
    while len(found) < count:
        candidate = draw.unused(lambda: draw.from_split(word))
        if not any(candidate in other or other in candidate for other in found):
            found.append(candidate)
    return found


def _cut(words: list[str], count_tokens: Callable[[str], int], target_tokens: int) -> list[str]:
    """As many of the words, from the front, as fit when a space stands before each."""
    num_tokens = 0
    for i, word in enumerate(words):
        num_tokens += count_tokens(f" {word}")
        if num_tokens > target_tokens:
            return words[:i]
    return words


def common_words(
    draw: Draw, count_tokens: Callable[[str], int], target_tokens: int, num_answers: int
) -> tuple[list[str], list[str]]:
    """The list and its common words in the order of their first occurrence, as (words, answers)."""
    pool = draw.adjectives + draw.nouns
    common = _distinct(draw, lambda: draw.rng.choice(pool), num_answers)
    others = [word for word in pool if not any(word in other or other in word for other in common)]
    others = draw.rng.sample(others, len(others))
    times = max(4, int(target_tokens * COMMON_SHARE))
    words = common * times
    rare = max(1, times // RARE_RATIO)
    num_tokens = sum(count_tokens(f" {word}") for word in common) * times
    for word in others:
        num_tokens += count_tokens(f" {word}") * rare
        if num_tokens > target_tokens:
            break
        words += [word] * rare
    words = _cut(draw.rng.sample(words, len(words)), count_tokens, target_tokens)
    return words, list(dict.fromkeys(word for word in words if word in common))


def frequent_words(
    draw: Draw, count_tokens: Callable[[str], int], target_tokens: int, num_answers: int
) -> tuple[list[str], list[str]]:
    """Invented words whose counts fall with the square of their rank, as (words, the most frequent by rank)."""
    ranked = _distinct(draw, draw.coin, max(20, 4 * num_answers))
    weights = [(rank + 1) ** -ZETA_EXPONENT for rank in range(len(ranked))]
    cost = sum(weight * count_tokens(f" {word}") for weight, word in zip(weights, ranked, strict=True))
    words = []
    for weight, word in zip(weights, ranked, strict=True):
        words += [word] * max(1, round(weight / cost * target_tokens))
    words = draw.rng.sample(words, len(words))
    kept = _cut(words, count_tokens, target_tokens)
    top = sorted(dict.fromkeys(kept), key=lambda word: (-kept.count(word), ranked.index(word)))
    return kept, top[:num_answers]


def make(
    draw: Draw, family: str, count_tokens: Callable[[str], int], target_tokens: int, num_answers: int
) -> tuple[str, str, tuple[str, ...]]:
    """A list as (text, question, answers)."""
    if family == "common_words":
        words, answers = common_words(draw, count_tokens, target_tokens, num_answers)
        question = draw.rng.choice(COMMON_QUESTIONS)
    else:
        words, answers = frequent_words(draw, count_tokens, target_tokens, num_answers)
        question = draw.rng.choice(FREQUENT_QUESTIONS)
    return " ".join(words), question.format(n=len(answers)), tuple(answers)


FAMILIES: tuple[str, ...] = (
    *documents.FAMILIES, "mixed", "json", *SEVERAL_FAMILIES, *COUNTED_FAMILIES, *HIDDEN_FAMILIES,
)  # fmt: skip
NUM_ANSWERS: dict[str, int] = {
    "multi_value": 4, "multi_query": 4, "recite": 16, "common_words": 5, "frequent_words": 3,
}  # fmt: skip


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
    """As the package's ``make_document``, for all families. Hidden numbers are one fact; other families have as many as
    one question asks for if that is more than 16. ``num_answers`` is how many answers a question has, in the families
    of ``NUM_ANSWERS``, which holds the defaults; short documents may have fewer.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {FAMILIES}, got {family!r}")
    if num_answers is not None and (family not in NUM_ANSWERS or num_answers < 1):
        raise ValueError(
            f"num_answers must be at least 1 and is for {tuple(NUM_ANSWERS)}, got {num_answers} for {family!r}"
        )
    num_answers = num_answers or NUM_ANSWERS.get(family, 1)
    if family not in (*SEVERAL_FAMILIES, *COUNTED_FAMILIES, *HIDDEN_FAMILIES):
        return documents.make_document(
            family=family, seed=seed, count_tokens=count_tokens, target_tokens=target_tokens, num_facts=num_facts,
            num_questions=num_questions, style=style, make=_facts_of,
        )  # fmt: skip
    draw = Draw(family, seed, style)
    if family in COUNTED_FAMILIES:
        text, asked, answers = make(draw, family, count_tokens, target_tokens, num_answers)
        question = Question(text=asked, answer=", ".join(answers), answers=answers, family=family, spans=())
        return Document(text=text, questions=(question,))

    def cost(sentence: str) -> int:
        return count_tokens(f" {sentence}")

    if family in HIDDEN_FAMILIES:
        facts, num_tokens = draw_facts(lambda: [hidden_fact(draw, family)], num_facts or 1, cost, target_tokens)
        sentences = _hide(draw, [fact.sentence for fact in facts], cost, target_tokens - num_tokens)
        questions = single_questions(draw, facts, spans_of(sentences, " "), num_questions)
    else:
        most = max(16, num_answers) if num_facts is None else num_facts
        facts, num_tokens = draw_facts(lambda: several_group(draw, family, num_answers), most, cost, target_tokens)
        sentences = [fact.sentence for fact in facts]
        mix_with_filler(draw, sentences, cost, target_tokens - num_tokens)
        spans = spans_of(sentences, " ")
        facts.sort(key=lambda fact: spans[fact.sentence])
        found = ask(draw, family, facts, num_answers)[:num_questions]
        questions = tuple(about(text, answer, wanted, spans) for text, answer, wanted in found)
    return Document(text=" ".join(sentences), questions=questions)


def _facts_of(draw: Draw, family: str) -> list[Fact]:
    if family == "json":
        return member(draw)
    if family == "mixed":
        family = draw.rng.choice(("multi_number", "multi_words", "variable", "paraphrase"))
    return documents.facts_of(draw, family)


def _hide(draw: Draw, sentences: Sequence[str], cost: Callable[[str], int], room: int) -> list[str]:
    """Repeated filler of at most `room` tokens with the sentences at random depths."""
    repeated = repeated_filler(draw)
    costs = [cost(sentence) for sentence in repeated]
    filler: list[str] = []
    while (room := room - costs[len(filler) % len(repeated)]) >= 0:
        filler.append(repeated[len(filler) % len(repeated)])
    for sentence in sentences:
        filler.insert(draw.rng.randint(0, len(filler)), sentence)
    return filler
