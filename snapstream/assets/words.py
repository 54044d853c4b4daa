"""The words and sentences that documents are made of. Changing any of them changes every document.

Next: `draw.py` draws from these lists; `vocabulary()` is what tokenizers are trained on, and its order is part of them.
"""

from __future__ import annotations

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
JSON_QUESTIONS: tuple[str, ...] = ('What is the value of "{k}"?', 'Look up "{k}".')
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


def vocabulary() -> list[str]:
    """The words of documents, for training a tokenizer; the order is fixed.

    It lacks the few words that only questions with several answers have ("codes", "all", "common"): a shipped tokenizer
    is older than they are and must stay as it was.
    """
    parts = [*ADJECTIVES, *NOUNS, *FIRST_NAMES, *LAST_NAMES, *PLACES, *TIMES, *VERBS]
    templates = [
        *FILLER,
        *UUID_FACT[:1],
        *KV_LINES,
        *KV_QUESTIONS,
        *VARIABLE_QUESTIONS,
        "Let = .",
        "And",
    ]
    for sentence, questions in (*NUMBER_FACTS, *WORDS_FACTS):
        templates += [sentence, *questions]
    for _, statements, questions in RELATIONS:
        templates += [*statements, *questions]
    for template in templates:
        text = "".join(ch if ch.isalpha() else " " for ch in template)
        parts += [word for word in text.split() if len(word) > 1]
    return list(dict.fromkeys(parts))


def syllables() -> tuple[str, ...]:
    """The pieces of invented words."""
    return SYLLABLES
