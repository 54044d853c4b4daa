"""Generated documents with planted facts and questions about them. Pure Python, deterministic by seed.

Why it is here: a cache that forgets can only be judged on text whose answers are known, at any length, without
downloads. The tiny model that ships with the package was trained on these documents and the demo asks it about
new ones. Nothing here knows a tokenizer or a model: the caller passes `count_tokens` and a target length.

Invariants:
- The same arguments give the same document, on every machine and Python version (only `random.Random` draws).
- `split="heldout"` uses keys and values that `split="train"` never produces (see `_is_heldout`).
- `document.text[start:end]` of a question's first span is the sentence that answers it.

Families (one per document):
    single_number, single_words   one fact in prose
    multi_number, multi_words     many facts of the same wording in prose; one key is asked
    single_uuid, multi_uuid       the same with an identifier such as 9f3c-a07b-51de
    kv                            nothing but key-value lines
    json                          a JSON object of names and numbers, one to a line
    variable                      chains of assignments in prose; the answer spells the chain out
    paraphrase                    facts about people in prose, asked in other words
    mixed                         all of the above in one document
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

FAMILIES: tuple[str, ...] = (
    "single_number", "single_words", "multi_number", "multi_words", "kv", "variable", "paraphrase", "mixed",
    "single_uuid", "multi_uuid", "json",
)  # fmt: skip

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
_PLACES: tuple[str, ...] = tuple(
    "mill market bakery station library chapel workshop square cellar kitchen courtyard museum school".split()
)
_TIMES: tuple[str, ...] = tuple("morning evening winter summer spring autumn night week month year".split())
_VERBS: tuple[str, ...] = tuple(
    """watched carried painted repaired followed remembered ignored cleaned admired borrowed lost found sold
    bought described moved counted""".split()
)
_SYLLABLES: tuple[str, ...] = tuple(
    """ba be bi bo bu da de di do du fa fe fi fo ga go gu ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni no
    nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo za ze zo""".split()
)
_FILLER: tuple[str, ...] = (
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
_NUMBER_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The code for {k} is {v}.", ("What is the code for {k}?", "Tell me the code for {k}.")),
    ("The number of {k} is {v}.", ("What is the number of {k}?", "Give the number of {k}.")),
    ("The ticket of {k} is {v}.", ("What is the ticket of {k}?", "Which ticket belongs to {k}?")),
)
_WORDS_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The phrase for {k} is {v}.", ("What is the phrase for {k}?", "Tell me the phrase for {k}.")),
    ("The password of {k} is {v}.", ("What is the password of {k}?", "Give the password of {k}.")),
    ("The motto of {k} is {v}.", ("What is the motto of {k}?", "Which motto belongs to {k}?")),
)
_UUID_FACT: tuple[str, tuple[str, ...]] = (
    "The identity card of {k} is {v}.",
    ("What is the identity card of {k}?", "Give the identity card of {k}."),
)
_JSON_QUESTIONS: tuple[str, ...] = ('What is the value of "{k}"?', 'Look up "{k}".')
_KV_LINES: tuple[str, ...] = ("- {k}: {v}", "* {k} = {v}", "| {k} | {v} |")
_KV_QUESTIONS: tuple[str, ...] = ("What is the value of {k}?", "Look up {k}.", "Which value has {k}?")
_VARIABLE_QUESTIONS: tuple[str, ...] = ("What is the variable {k}?", "Resolve the variable {k}.")
# relation: (is the value a number, statements, questions in other words)
_RELATIONS: tuple[tuple[bool, tuple[str, ...], tuple[str, ...]], ...] = (
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
    """A question about a document. `spans` are character spans of the facts it needs, in the order of use."""

    text: str
    answer: str
    value: str  # the part of the answer that must appear to count; is `answer` except in `variable`
    family: str
    spans: tuple[tuple[int, int], ...]

    def is_answered_by(self, text: str) -> bool:
        """The value is contained in the text, upper and lower case alike (RULER's rule)."""
        return self.value.lower() in text.lower()


@dataclass(frozen=True, kw_only=True)
class Document:
    """Text and what can be asked about it."""

    text: str
    questions: tuple[Question, ...]

    def prompt(self, question: Question) -> str:
        """The user message that asks `question` at the end of the document."""
        return f"{self.text}\n\n{question.text}"


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


@dataclass(frozen=True)
class _Fact:
    sentence: str
    key: str
    answer: str
    value: str
    question: str
    family: str
    needs: tuple[str, ...] = ()  # sentences of other facts that the answer goes through


def _is_heldout(text: str) -> bool:
    """Whether a key or value belongs to the held-out split: one in eight, by checksum."""
    return zlib.crc32(text.encode()) % 8 == 0


class _Maker:
    """Draws facts and filler of one document."""

    def __init__(self, rng: Random, style: Style, split: str) -> None:
        self.rng, self.style, self.heldout = rng, style, split == "heldout"
        self.adjectives = ADJECTIVES[: style.num_words]
        self.nouns = NOUNS[: style.num_words]
        self.used: set[str] = set()
        self.number_fact = rng.choice(_NUMBER_FACTS)
        self.words_fact = rng.choice(_WORDS_FACTS)
        self.kv_line = rng.choice(_KV_LINES)

    def coin(self) -> str:
        """An invented word."""
        return "".join(self.rng.choice(_SYLLABLES) for _ in range(self.rng.randint(2, 3)))

    def _from_split(self, draw: Callable[[], str]) -> str:
        while True:
            text = draw()
            if _is_heldout(text) == self.heldout:
                return text

    def _unused(self, draw: Callable[[], str]) -> str:
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
            return self._unused(draw)
        return self._unused(lambda: self._from_split(draw))

    def number(self) -> str:
        """A number of `value_digits` digits."""
        low = 10 ** (self.style.value_digits - 1)
        return self._from_split(lambda: str(self.rng.randrange(low, 10 * low)))

    def uuid(self) -> str:
        """Three groups of four hexadecimal digits."""
        return self._from_split(lambda: "-".join(f"{self.rng.randrange(65536):04x}" for _ in range(3)))

    def words(self) -> str:
        """A value of `value_words` words."""
        count = self.style.value_words
        pool = self.adjectives + self.nouns
        return self._from_split(lambda: " ".join(self.rng.choice(pool) for _ in range(count)))

    def person(self) -> str:
        """An unused full name."""

        def draw() -> str:
            first, last = self.rng.choice(FIRST_NAMES), self.rng.choice(LAST_NAMES)
            return f"{first} {self.coin().capitalize() if self.rng.random() < self.style.coined else last}"

        return self._unused(lambda: self._from_split(draw))

    def _ask(self, templates: Sequence[str], key: str) -> str:
        if self.rng.random() < self.style.terse:
            return f"And {key}?"
        return self.rng.choice(templates).format(k=key)

    def needle(self, is_number: bool, family: str) -> list[_Fact]:
        """One fact in the wording that this document uses throughout."""
        sentence, questions = self.number_fact if is_number else self.words_fact
        key, value = self.key(), self.number() if is_number else self.words()
        return [_Fact(sentence.format(k=key, v=value), key, value, value, self._ask(questions, key), family)]

    def pair(self) -> list[_Fact]:
        """One key-value line."""
        key, value = self.key(), self.number() if self.rng.random() < 0.7 else self.words()
        sentence, question = self.kv_line.format(k=key, v=value), self._ask(_KV_QUESTIONS, key)
        return [_Fact(sentence, key, value, value, question, "kv")]

    def identity(self, family: str) -> list[_Fact]:
        """One fact with an identifier."""
        sentence, questions = _UUID_FACT
        key, value = self.key(), self.uuid()
        return [_Fact(sentence.format(k=key, v=value), key, value, value, self._ask(questions, key), family)]

    def member(self) -> list[_Fact]:
        """One line of a JSON object."""
        key, value = self.key(), self.number()
        question = self.rng.choice(_JSON_QUESTIONS).format(k=key)
        return [_Fact(f'  "{key}": {value},', key, value, value, question, "json")]

    def chain(self) -> list[_Fact]:
        """A chain of assignments; only its last variable has a number. The answer walks the chain."""

        def draw() -> str:
            return self.coin() if self.rng.random() < self.style.coined else self.rng.choice(self.nouns)

        names = [self._unused(draw) for _ in range(self.rng.randint(1, self.style.max_depth))]
        value = self.number()
        targets = [*names[1:], value]
        sentences = [f"Let {name} = {target}." for name, target in zip(names, targets, strict=True)]
        facts = []
        for i, name in enumerate(names):
            question = self._ask(_VARIABLE_QUESTIONS, name)
            answer = " = ".join(targets[i:])
            needs = tuple(sentences[i + 1 :])
            facts.append(_Fact(sentences[i], name, answer, value, question, "variable", needs))
        return facts

    def persona(self) -> list[_Fact]:
        """Two or three facts about one person, each asked in other words than it is stated in."""
        key, facts = self.person(), []
        for is_number, statements, questions in self.rng.sample(_RELATIONS, self.rng.randint(2, 3)):
            value = self.number() if is_number else self.words()
            sentence = self.rng.choice(statements).format(k=key, v=value)
            question = self.rng.choice(questions).format(k=key)
            facts.append(_Fact(sentence, key, value, value, question, "paraphrase"))
        return facts

    def facts(self, family: str) -> list[_Fact]:
        """The next group of facts for a document of `family`."""
        if family == "mixed":
            family = self.rng.choice(("multi_number", "multi_words", "variable", "paraphrase"))
        if family == "kv":
            return self.pair()
        if family == "variable":
            return self.chain()
        if family == "paraphrase":
            return self.persona()
        if family == "json":
            return self.member()
        if family.endswith("uuid"):
            return self.identity(family)
        return self.needle(family.endswith("number"), family)

    def filler(self) -> str:
        """A sentence that says nothing anyone will ask about."""
        draw = self.rng.choice
        if self.rng.random() < self.style.gibberish:
            words = [self.coin() for _ in range(self.rng.randint(4, 8))]
            return " ".join(words).capitalize() + "."
        return draw(_FILLER).format(
            a=draw(self.adjectives), b=draw(self.adjectives), n=draw(self.nouns), m=draw(self.nouns),
            p=draw(_PLACES), t=draw(_TIMES), v=draw(_VERBS), f=draw(FIRST_NAMES), g=draw(FIRST_NAMES),
        )  # fmt: skip


def make_document(
    *,
    family: str,
    seed: int | str,
    count_tokens: Callable[[str], int],
    target_tokens: int,
    num_facts: int | None = None,
    num_questions: int | None = None,
    split: str = "heldout",
    style: Style | None = None,
) -> Document:
    """A document of at most about `target_tokens` tokens with `num_facts` facts or more, at random depths.

    Without `num_facts`, single needles have one fact, key-value lists fill the document and the other families
    have 16. `num_questions` questions are drawn from the facts (all, in random order, when it is None). Facts come
    in groups (chains, people), so the last group may go over `num_facts`, never over the target length.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {FAMILIES}, got {family!r}")
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', got {split!r}")
    rng = Random(f"{family}/{split}/{seed}")
    maker = _Maker(rng, style or Style(), split)
    is_list = family in ("kv", "json")
    if num_facts is None:
        num_facts = 1 if family.startswith("single") else max(1, target_tokens) if is_list else 16
    separator = "\n" if is_list else " "

    facts: list[_Fact] = []
    num_tokens = 0
    while len(facts) < num_facts:
        group = maker.facts(family)
        group_tokens = sum(count_tokens(separator + fact.sentence) for fact in group)
        if facts and num_tokens + group_tokens > target_tokens:
            break
        facts += group
        num_tokens += group_tokens
    sentences = [fact.sentence for fact in facts]
    if not is_list:
        while True:
            sentence = maker.filler()
            num_tokens += count_tokens(separator + sentence)
            if num_tokens > target_tokens:
                break
            sentences.append(sentence)
        rng.shuffle(sentences)

    spans: dict[str, tuple[int, int]] = {}
    start = 0
    for sentence in sentences:
        spans[sentence] = (start, start + len(sentence))
        start += len(sentence) + len(separator)
    asked = rng.sample(facts, len(facts) if num_questions is None else min(num_questions, len(facts)))
    questions = tuple(
        Question(
            text=fact.question,
            answer=fact.answer,
            value=fact.value,
            family=family if fact.family.startswith("multi") and family != "mixed" else fact.family,
            spans=tuple(spans[sentence] for sentence in (fact.sentence, *fact.needs)),
        )
        for fact in asked
    )
    return Document(text=separator.join(sentences), questions=questions)


def vocabulary() -> list[str]:
    """Every word that documents can contain, for training a tokenizer; the order is fixed."""
    parts = [*ADJECTIVES, *NOUNS, *FIRST_NAMES, *LAST_NAMES, *_PLACES, *_TIMES, *_VERBS]
    templates = [
        *_FILLER,
        *_UUID_FACT[:1],
        *_KV_LINES,
        *_KV_QUESTIONS,
        *_VARIABLE_QUESTIONS,
        "Let = .",
        "And",
    ]
    for sentence, questions in (*_NUMBER_FACTS, *_WORDS_FACTS):
        templates += [sentence, *questions]
    for _, statements, questions in _RELATIONS:
        templates += [*statements, *questions]
    for template in templates:
        text = "".join(ch if ch.isalpha() else " " for ch in template)
        parts += [word for word in text.split() if len(word) > 1]
    return list(dict.fromkeys(parts))


def syllables() -> tuple[str, ...]:
    """The pieces of invented words."""
    return _SYLLABLES
