"""Generated documents with planted facts and questions about them. Pure Python, deterministic by seed.

Why it is here: a cache that forgets can only be judged on text whose answers are known, at any length, without
downloads. The tiny models that ship with the package were trained on these documents and the demo asks about new
ones. Nothing here knows a tokenizer or a model: the caller passes `count_tokens` and a target length.

Invariants:
- The same arguments give the same document, on every machine and Python version (only `random.Random` draws).
- `Style(split="heldout")` uses keys and values that `Style(split="train")` never produces (see `draw.is_heldout`).
- `document.text[start:end]` of a question's spans are the sentences that answer it.

Families (one per document), a file for each group:
    facts.py    single_number, single_words   one fact in prose
                multi_number, multi_words     many facts of the same wording in prose; one key is asked
                single_uuid, multi_uuid       the same with an identifier such as 9f3c-a07b-51de
                kv                            nothing but key-value lines
                json                          a JSON object of names and numbers, one to a line
                variable                      chains of assignments in prose; the answer spells the chain out
                paraphrase                    facts about people in prose, asked in other words
                mixed                         the above except identifiers and lists, in one document
    several.py  multi_value                   several values of each key in different places; all of them are wanted
                multi_query                   several keys are asked at once
                recite                        many keys are asked at once: a long answer
    counted.py  common_words, frequent_words  the words that occur most often in a list
    hidden.py   passkey, number_string        a number of 5 or 10 digits in sentences that repeat

`make.py` composes, `draw.py` draws, `words.py` holds every word, `document.py` holds the result.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from snapstream.assets.words import (
    ADJECTIVES,
    COMMON_QUESTIONS,
    FILLER,
    FIRST_NAMES,
    FREQUENT_QUESTIONS,
    HIDDEN_FACTS,
    JSON_QUESTIONS,
    KV_LINES,
    KV_QUESTIONS,
    LAST_NAMES,
    NOUNS,
    NUMBER_FACTS,
    NUMBER_NOUNS,
    PLACES,
    RELATIONS,
    SEVERAL_QUESTIONS,
    SYLLABLES,
    TIMES,
    UUID_FACT,
    VARIABLE_QUESTIONS,
    VERBS,
    WORDS_FACTS,
)

# A generated document: its text, the questions about it, and how hard it should be.


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a document. `spans` are character spans of the facts it needs, in the order of use.

    `spans` is empty where every word counts (aggregation).
    """

    text: str
    answer: str  # what a perfect model writes
    answers: tuple[str, ...]  # the parts of it that count, in its order; all are wanted
    family: str
    spans: tuple[tuple[int, int], ...]

    @property
    def value(self) -> str:
        """The parts of the answer that count, as one text."""
        return ", ".join(self.answers)

    def score(self, text: str) -> float:
        """Share of the answers contained in the text, upper and lower case alike (RULER's rule)."""
        lower = text.lower()
        return sum(answer.lower() in lower for answer in self.answers) / len(self.answers)

    def is_answered_by(self, text: str) -> bool:
        """All answers are contained in the text."""
        return self.score(text) == 1.0


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and the questions about it."""

    text: str
    questions: tuple[Question, ...]

    def prompt(self, question: Question, *, question_first: bool = False) -> str:
        """The user message that asks `question`: at the end of the document, or before it."""
        parts = (question.text, self.text) if question_first else (self.text, question.text)
        return "\n\n".join(parts)


@dataclass(frozen=True, kw_only=True)
class Style:
    """How hard documents are; the defaults are the full task, a curriculum starts below them."""

    num_words: int = 10_000  # draw keys and values from so many adjectives and nouns
    key_words: int = 2  # words per key
    value_words: int = 3  # words per word value
    value_digits: int = 7  # digits per number value
    terse: float = 0.1  # share of questions that name the key and nothing else
    coined: float = 0.1  # share of key words that are invented on the spot, hence of several tokens
    max_depth: int = 3  # longest chain of assignments
    gibberish: float = 0.1  # share of filler sentences made of invented words
    split: str = "heldout"  # or "train": the keys and values of one never occur in the other


@dataclass(frozen=True)
class Fact:
    """One sentence to plant and the question about it."""

    sentence: str
    key: str
    answer: str
    value: str
    question: str
    family: str
    needs: tuple[str, ...] = ()  # sentences of other facts that the answer goes through


# Draws keys, values and filler. One generator per document; this module decides what a split may use.
#
# Invariant: the order of draws is part of the format. A new kind of draw comes from a family of its own, so that old
# families keep their documents.


def is_heldout(text: str) -> bool:
    """Whether a key or value belongs to the held-out split: one in eight, by checksum."""
    return zlib.crc32(text.encode()) % 8 == 0


class Draw:
    """Draws keys, values and filler of one document."""

    def __init__(self, rng: Random, style: Style, split: str) -> None:
        self.rng, self.style, self.heldout = rng, style, split == "heldout"
        self.adjectives = ADJECTIVES[: style.num_words]
        self.nouns = NOUNS[: style.num_words]
        self.used: set[str] = set()
        self.number_fact = rng.choice(NUMBER_FACTS)
        self.words_fact = rng.choice(WORDS_FACTS)
        self.kv_line = rng.choice(KV_LINES)

    def coin(self) -> str:
        """An invented word."""
        return "".join(self.rng.choice(SYLLABLES) for _ in range(self.rng.randint(2, 3)))

    def from_split(self, draw: Callable[[], str]) -> str:
        """The first drawn text that belongs to the split."""
        while True:
            text = draw()
            if is_heldout(text) == self.heldout:
                return text

    def unused(self, draw: Callable[[], str]) -> str:
        """The first drawn text that this document has not had."""
        while True:
            text = draw()
            if text not in self.used:
                self.used.add(text)
                return text

    def key(self) -> str:
        """An unused key: adjective and noun, now and then with an invented word."""

        def draw() -> str:
            words = [self.rng.choice(self.adjectives)] if self.style.key_words > 1 else []
            words.append(self.rng.choice(self.nouns))
            if self.rng.random() < self.style.coined:
                words[self.rng.randrange(len(words))] = self.coin()
            return " ".join(words)

        if self.style.key_words == 1:  # single words are too few to hold any out
            return self.unused(draw)
        return self.unused(lambda: self.from_split(draw))

    def number(self) -> str:
        """A number of `value_digits` digits."""
        low = 10 ** (self.style.value_digits - 1)
        return self.from_split(lambda: str(self.rng.randrange(low, 10 * low)))

    def uuid(self) -> str:
        """Three groups of four hexadecimal digits."""
        return self.from_split(lambda: "-".join(f"{self.rng.randrange(65536):04x}" for _ in range(3)))

    def words(self) -> str:
        """A value of `value_words` words."""
        count = self.style.value_words
        pool = self.adjectives + self.nouns
        return self.from_split(lambda: " ".join(self.rng.choice(pool) for _ in range(count)))

    def person(self) -> str:
        """An unused full name."""

        def draw() -> str:
            first, last = self.rng.choice(FIRST_NAMES), self.rng.choice(LAST_NAMES)
            return f"{first} {self.coin().capitalize() if self.rng.random() < self.style.coined else last}"

        return self.unused(lambda: self.from_split(draw))

    def filler(self) -> str:
        """A sentence that says nothing anyone will ask about."""
        draw = self.rng.choice
        if self.rng.random() < self.style.gibberish:
            words = [self.coin() for _ in range(self.rng.randint(4, 8))]
            return " ".join(words).capitalize() + "."
        return draw(FILLER).format(
            a=draw(self.adjectives), b=draw(self.adjectives), n=draw(self.nouns), m=draw(self.nouns),
            p=draw(PLACES), t=draw(TIMES), v=draw(VERBS), f=draw(FIRST_NAMES), g=draw(FIRST_NAMES),
        )  # fmt: skip


# Families whose questions have one answer each: a sentence states it, or a chain of sentences.

FACT_FAMILIES = (
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


# One number in text that repeats itself (InfiniteBench's pass key and number string): exact retrieval.

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


# Families whose questions have several answers, each a fact in prose (RULER's multi-value and multi-query).
#
# `multi_value` states several values of one key in different places and asks for all of them. `multi_query` and
# `recite` name several keys in the question; the answer opens with the words before the first of them and says each
# key again before its value, because that is how a small model finds its place in the list and keeps it. `recite`
# names many, so that its answer is several times a small ring.

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


# Aggregation (RULER's common and frequent words): a question asks for the commonest words, so every word counts.
#
# The words that are asked for belong to the split; the others may be any. No word is part of another one that is asked
# for, so that containment means the word itself.

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


# Composes a document of a family: facts among filler, spans, questions.

pass

FAMILIES: tuple[str, ...] = (*FACT_FAMILIES, *SEVERAL_FAMILIES, *COUNTED_FAMILIES, *HIDDEN_FAMILIES)
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
    if family in COUNTED_FAMILIES:
        text, asked, answers = make(draw, family, count_tokens, target_tokens, num_answers)
        question = Question(text=asked, answer=", ".join(answers), answers=answers, family=family, spans=())
        return Document(text=text, questions=(question,))
    separator = "\n" if family in _LISTS else " "

    def cost(sentence: str) -> int:
        return count_tokens(separator + sentence)

    if num_facts is None:
        is_one = family.startswith("single") or family in HIDDEN_FAMILIES
        num_facts = 1 if is_one else max(1, target_tokens) if family in _LISTS else max(16, num_answers)
    facts, num_tokens = _draw_facts(draw, family, num_facts, num_answers, cost, target_tokens)
    sentences = [fact.sentence for fact in facts]
    if family in HIDDEN_FAMILIES:
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
    if family in SEVERAL_FAMILIES:
        facts.sort(key=lambda fact: spans[fact.sentence])
        found = ask(draw, family, facts, num_answers)[:num_questions]
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
        if family in HIDDEN_FAMILIES:
            more = [hidden_fact(draw, family)]
        elif family in SEVERAL_FAMILIES:
            more = several_group(draw, family, num_answers)
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
    repeated = repeated_filler(draw)
    costs = [cost(sentence) for sentence in repeated]
    filler: list[str] = []
    while (room := room - costs[len(filler) % len(repeated)]) >= 0:
        filler.append(repeated[len(filler) % len(repeated)])
    for sentence in sentences:
        filler.insert(draw.rng.randint(0, len(filler)), sentence)
    return filler
