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

from snapstream.assets.documents.document import Document, Question, Style
from snapstream.assets.documents.make import FAMILIES, NUM_ANSWERS, make_document
from snapstream.assets.documents.words import syllables, vocabulary

__all__ = ["FAMILIES", "NUM_ANSWERS", "Document", "Question", "Style", "make_document", "syllables", "vocabulary"]
