"""Generated documents with planted facts and questions about them: deterministic by seed, of any length, no download.

The shipped tiny models were trained on these documents; the demo asks about new ones, and calibration reads them.
Nothing here knows a tokenizer or a model: the caller passes ``count_tokens`` and a target length.
``recipes/documents.py`` has more families, for training and evaluation.

Invariants: the same arguments give the same document on every machine and Python version (only ``random.Random``
draws); the order of draws, and every word, are part of the format. ``Style(split="heldout")`` uses keys and values that
``Style(split="train")`` never produces.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

FAMILIES: dict[str, str] = {
    "single_number": "one fact in prose",
    "single_words": "one fact in prose",
    "single_uuid": "one fact in prose, with an identifier such as 9f3c-a07b-51de",
    "multi_number": "many facts of the same wording in prose; one key is asked",
    "multi_words": "the same",
    "multi_uuid": "the same",
    "kv": "nothing but key-value lines",
    "variable": "chains of assignments in prose; the answer spells the chain out",
    "paraphrase": "facts about people in prose, asked in other words",
}

LISTS = ("kv", "json")  # one line per fact and nothing else

ADJECTIVES: tuple[str, ...] = tuple(
    """amber velvet copper silent golden crimson frozen hollow distant gentle bitter ancient silver broken purple
    narrow hidden marble wooden scarlet rapid mellow dusty rugged lonely polished tangled sunny misty crooked brave
    humble olive ivory cobalt jade coral violet rusty smoky sandy mossy frosty stormy quiet noisy clever patient
    eager proud calm fierce nimble sturdy tiny giant northern southern eastern western upper lower inner outer
    early late wild tame sweet sour salty plain fancy clumsy dainty drowsy earnest faded gleaming hasty icy jolly
    keen lively modest neat odd pale quaint restless shiny tidy urban vivid weary young zesty bold crisp dim
    elegant flat grand heavy idle just kind lean mild noble open prime quick round sharp tall vast warm azure
    bronze chalky dense earthy fluffy glossy harsh inky jagged knotty leafy muddy nutty oaken pearly""".split()
)
NOUNS: tuple[str, ...] = tuple(
    """falcon otter lantern harbor meadow cedar anchor violin compass glacier thimble orchard pepper saddle canyon
    ribbon beacon walnut turtle castle fiddle marten button candle dragon engine feather garden hammer island jacket
    kettle ladder magnet needle oyster pillow quiver rocket shovel temple urchin valley window yarrow zipper acorn
    badger cactus donkey ember ferret goblet heron ingot jasmine kayak lizard mango nectar onion parrot quartz raven
    salmon tulip umbrella vessel wagon yogurt zebra almond basket cherry dagger elbow fossil gravel hazel insect
    juniper kitten lemon mirror nutmeg opal panther quilt radish spider teapot uncle velcro willow xylem yak
    arrow barrel cobra daisy easel fern gecko hinge iris jigsaw knot lotus mural nickel oboe pebble quail
    robin sparrow trumpet unicorn vulture wallet yacht zither apron biscuit carrot dolphin eagle fountain guitar
    helmet igloo jewel koala lobster muffin napkin orchid penguin queen rabbit scarf tiger urn violet_ whistle
    axle bonnet cabin dome emblem flute glove hood ink jug keel loom mast net oar plum quarry reef stone tower
    vine well yoke amulet bridge clover drum envelope forest gate hill inlet jar key lake moth nest oak path
    quill river sail tent vase wheel yard""".replace("violet_", "viola").split()
)
FIRST_NAMES: tuple[str, ...] = tuple(
    """Marta Harlan Ilse Tobias Nadia Corin Petra Selwyn Agnes Boris Celia Dorian Edda Felix Greta Hugo Ines Jonas
    Karla Leo Mina Nils Olga Pavel Quentin Rosa Stefan Tilda Ulric Vera Walter Yara Zeno Alma Bruno Clara Dmitri
    Elsa Franz Gilda""".split()
)
LAST_NAMES: tuple[str, ...] = tuple(
    """Quill Brandt Moreau Vance Holloway Lindqvist Okoro Santos Petrov Marsh Keller Ivers Dunne Castell Abbott
    Novak Ferro Gale Hoffman Iyer Jansen Kovac Larsen Mbeki Nolan Orsini Pryce Rossi Sato Tanaka Ueda Vargas Weber
    Xu Yates Zhou Arden Blum Cole Drake""".split()
)
PLACES: tuple[str, ...] = tuple(
    "mill market bakery station library chapel workshop square cellar kitchen courtyard museum school".split()
)
TIMES: tuple[str, ...] = tuple("morning evening winter summer spring autumn night week month year".split())
VERBS: tuple[str, ...] = tuple(
    """watched carried painted repaired followed remembered ignored cleaned admired borrowed lost found sold
    bought described moved counted""".split()
)
SYLLABLES: tuple[str, ...] = tuple(
    """ba be bi bo bu da de di do du fa fe fi fo ga go gu ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni no
    nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo za ze zo""".split()
)
FILLER: tuple[str, ...] = (
    "The {a} {n} stood near the {p} for most of the {t}.",
    "In the {t}, {f} {v} the {a} {n} again.",
    "Nobody at the {p} had seen a {n} that {t}.",
    "{f} {v} the {n} and went back to the {p}.",
    "It rained over the {p} until the {t} was over.",
    "Some people said that the {n} was too {a} for the {p}.",
    "Every {t} the {p} smelled of bread and old paper.",
    "A {a} {n} and a {b} {m} lay on the table.",
    "They talked about the {n}, the weather and the price of salt.",
    "{f} asked whether the {p} would open before the {t}.",
    "The road to the {p} was {a} and nearly empty.",
    "Later {f} wrote a letter about the {a} {n}.",
    "There was little to do at the {p} but wait.",
    "The children {v} the {n} while {f} slept.",
    "By the end of the {t} the {n} looked rather {a}.",
    "{f} and {g} {v} the {n} behind the {p}.",
    "No one could explain why the {n} was so {a}.",
    "The {p} kept a {n} in a box under the stairs.",
    "After lunch {f} {v} a {a} {n} near the {p}.",
    "On the wall hung a picture of a {n} beside a {b} {m}.",
    "That {t} was long, and the {p} stayed closed.",
    "The {n} made a sound, and then everything was still.",
    "{f} had never trusted the {a} {n} from the {p}.",
    "Most visitors preferred the {n} to the {m}.",
)


# (sentence, questions). {k} is the key, {v} the value; the value follows the key at once.
NUMBER_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The code for {k} is {v}.", ("What is the code for {k}?", "Tell me the code for {k}.")),
    ("The number of {k} is {v}.", ("What is the number of {k}?", "Give the number of {k}.")),
    ("The ticket of {k} is {v}.", ("What is the ticket of {k}?", "Which ticket belongs to {k}?")),
)
WORDS_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The phrase for {k} is {v}.", ("What is the phrase for {k}?", "Tell me the phrase for {k}.")),
    ("The password of {k} is {v}.", ("What is the password of {k}?", "Give the password of {k}.")),
    ("The motto of {k} is {v}.", ("What is the motto of {k}?", "Which motto belongs to {k}?")),
)
UUID_FACT: tuple[str, tuple[str, ...]] = (
    "The identity card of {k} is {v}.",
    ("What is the identity card of {k}?", "Give the identity card of {k}."),
)
KV_LINES: tuple[str, ...] = ("- {k}: {v}", "* {k} = {v}", "| {k} | {v} |")
KV_QUESTIONS: tuple[str, ...] = ("What is the value of {k}?", "Look up {k}.", "Which value has {k}?")
VARIABLE_QUESTIONS: tuple[str, ...] = ("What is the variable {k}?", "Resolve the variable {k}.")
# relation: (is the value a number, statements, questions in other words)
RELATIONS: tuple[tuple[bool, tuple[str, ...], tuple[str, ...]], ...] = (
    (True, ("{k} can be reached at {v}.", "To call {k} dial {v}."),
     ("What is the telephone number of {k}?", "How do I phone {k}?")),
    (True, ("{k} wears the badge {v}.", "The guards know {k} by {v}."),
     ("Which identity card belongs to {k}?", "What is on the name plate of {k}?")),
    (True, ("{k} earned {v} coins.", "They paid {k} exactly {v} coins."),
     ("What was the salary of {k}?", "How much money did {k} make?")),
    (False, ("{k} is fond of {v}.", "Nothing pleases {k} like {v}."),
     ("What does {k} love most?", "What are the favourite things of {k}?")),
    (False, ("{k} lives at {v}.", "You will find the house of {k} at {v}."),
     ("What is the home address of {k}?", "Where should I visit {k}?")),
    (False, ("{k} hid {v}.", "Out of sight {k} put {v}."),
     ("What did {k} conceal?", "Which objects are kept secret by {k}?")),
)  # fmt: skip


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
        """Share of the answers contained in the text, ignoring case (RULER's rule)."""
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


def is_heldout(text: str) -> bool:
    """Whether a key or value belongs to the held-out split: one in eight, by checksum."""
    return zlib.crc32(text.encode()) % 8 == 0


class Draw:
    """Draws keys, values and filler of one document."""

    def __init__(self, family: str, seed: int | str, style: Style | None = None) -> None:
        self.style = style = style or Style()
        if style.split not in ("train", "heldout"):
            raise ValueError(f"split must be 'train' or 'heldout', got {style.split!r}")
        self.rng, self.is_heldout = Random(f"{family}/{style.split}/{seed}"), style.split == "heldout"
        self.adjectives = ADJECTIVES[: style.num_words]
        self.nouns = NOUNS[: style.num_words]
        self.used: set[str] = set()
        self.number_fact = self.rng.choice(NUMBER_FACTS)
        self.words_fact = self.rng.choice(WORDS_FACTS)
        self.kv_line = self.rng.choice(KV_LINES)

    def coin(self) -> str:
        """An invented word."""
        return "".join(self.rng.choice(SYLLABLES) for _ in range(self.rng.randint(2, 3)))

    def from_split(self, draw: Callable[[], str]) -> str:
        """The first drawn text that belongs to the split."""
        while True:
            text = draw()
            if is_heldout(text) == self.is_heldout:
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


def ask(draw: Draw, templates: Sequence[str], key: str) -> str:
    if draw.rng.random() < draw.style.terse:
        return f"And {key}?"
    return draw.rng.choice(templates).format(k=key)


def needle(draw: Draw, is_number: bool, family: str) -> list[Fact]:
    """One fact in the wording that this document uses throughout."""
    sentence, questions = draw.number_fact if is_number else draw.words_fact
    key, value = draw.key(), draw.number() if is_number else draw.words()
    return [Fact(sentence.format(k=key, v=value), key, value, value, ask(draw, questions, key), family)]


def pair(draw: Draw) -> list[Fact]:
    """One key-value line."""
    key, value = draw.key(), draw.number() if draw.rng.random() < 0.7 else draw.words()
    sentence, question = draw.kv_line.format(k=key, v=value), ask(draw, KV_QUESTIONS, key)
    return [Fact(sentence, key, value, value, question, "kv")]


def identity(draw: Draw, family: str) -> list[Fact]:
    """One fact with an identifier."""
    sentence, questions = UUID_FACT
    key, value = draw.key(), draw.uuid()
    return [Fact(sentence.format(k=key, v=value), key, value, value, ask(draw, questions, key), family)]


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
        question = ask(draw, VARIABLE_QUESTIONS, name)
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


def facts_of(draw: Draw, family: str) -> list[Fact]:
    """The next facts of a document of ``family`` that belong together."""
    if family == "kv":
        return pair(draw)
    if family == "variable":
        return chain(draw)
    if family == "paraphrase":
        return persona(draw)
    if family.endswith("uuid"):
        return identity(draw, family)
    return needle(draw, family.endswith("number"), family)


def draw_facts(
    make: Callable[[], list[Fact]], num_facts: int, cost: Callable[[str], int], target_tokens: int
) -> tuple[list[Fact], int]:
    """Groups of facts until there are ``num_facts`` or the next group does not fit, and their tokens."""
    facts: list[Fact] = []
    num_tokens = 0
    while len(facts) < num_facts:
        group = make()
        group_tokens = sum(cost(fact.sentence) for fact in group)
        if facts and num_tokens + group_tokens > target_tokens:
            break
        facts += group
        num_tokens += group_tokens
    return facts, num_tokens


def mix_with_filler(draw: Draw, sentences: list[str], cost: Callable[[str], int], num_tokens: int) -> None:
    """Add filler of at most ``num_tokens`` tokens, and shuffle."""
    while (num_tokens := num_tokens - cost(filler := draw.filler())) >= 0:
        sentences.append(filler)
    draw.rng.shuffle(sentences)


def spans_of(sentences: Sequence[str], separator: str) -> dict[str, tuple[int, int]]:
    """Where each sentence stands in the joined text."""
    spans, start = {}, 0
    for sentence in sentences:
        spans[sentence] = (start, start + len(sentence))
        start += len(sentence) + len(separator)
    return spans


def about(text: str, answer: str, facts: Sequence[Fact], spans: dict[str, tuple[int, int]]) -> Question:
    """The question ``text`` whose answer needs these facts."""
    return Question(
        text=text,
        answer=answer,
        answers=tuple(fact.value for fact in facts),
        family=facts[0].family,
        spans=tuple(spans[sentence] for fact in facts for sentence in (fact.sentence, *fact.needs)),
    )


def single_questions(
    draw: Draw, facts: Sequence[Fact], spans: dict[str, tuple[int, int]], num_questions: int | None
) -> tuple[Question, ...]:
    """Questions about one fact each, in random order."""
    count = len(facts) if num_questions is None else min(num_questions, len(facts))
    return tuple(about(fact.question, fact.answer, [fact], spans) for fact in draw.rng.sample(facts, count))


def make_document(
    *,
    family: str,
    seed: int | str,
    count_tokens: Callable[[str], int],
    target_tokens: int,
    num_facts: int | None = None,
    num_questions: int | None = None,
    style: Style | None = None,
    make: Callable[[Draw, str], list[Fact]] = facts_of,
) -> Document:
    """A document of at most about ``target_tokens`` tokens with ``num_facts`` facts or more, at random depths.

    Without ``num_facts``, single needles have one fact, key-value lists fill the document and the other families have
    16. ``num_questions`` questions are drawn from the facts (all, in random order, when it is None); only within a
    chain of assignments do two of them share a fact. Facts come in groups (chains, people), so the last group may go
    over ``num_facts``, never over the target length. ``make`` gives the next group of a family that is not one of
    ``FAMILIES``.
    """
    if make is facts_of and family not in FAMILIES:
        raise ValueError(f"family must be one of {tuple(FAMILIES)}, got {family!r}")
    draw = Draw(family, seed, style)
    is_list = family in LISTS
    separator = "\n" if is_list else " "

    def cost(sentence: str) -> int:
        return count_tokens(separator + sentence)

    if num_facts is None:
        num_facts = 1 if family.startswith("single") else max(1, target_tokens) if is_list else 16
    facts, num_tokens = draw_facts(lambda: make(draw, family), num_facts, cost, target_tokens)
    sentences = [fact.sentence for fact in facts]
    if not is_list:
        mix_with_filler(draw, sentences, cost, target_tokens - num_tokens)
    questions = single_questions(draw, facts, spans_of(sentences, separator), num_questions)
    return Document(text=separator.join(sentences), questions=questions)
