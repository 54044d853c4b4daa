"""Generated documents say what they claim: same seed same text, true spans, lengths kept, held-out keys unseen."""

from __future__ import annotations

import zlib
from collections import Counter

import pytest

from recipes.documents import FAMILIES, make_document
from snapstream.assets.documents import Style

HIDDEN = ("passkey", "number_string")
PINNED = 2055984478  # of test_old_families_keep_their_documents


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_deterministic_and_their_spans_true(family: str) -> None:
    args = {"family": family, "count_tokens": words, "target_tokens": 400}
    document = make_document(seed=3, **args)  # type: ignore[arg-type]
    assert document == make_document(seed=3, **args)  # type: ignore[arg-type]
    assert document.text != make_document(seed=4, **args).text  # type: ignore[arg-type]
    assert 200 < words(document.text) <= 400
    for question in document.questions:
        for i, answer in enumerate(question.answers):
            assert answer in question.answer and answer in document.text
            if question.spans and family not in ("variable", "mixed"):  # whose first span is where the chain starts
                start, end = question.spans[i]
                assert answer in document.text[start:end]
            assert not question.spans or any(answer in document.text[a:b] for a, b in question.spans)
        assert question.text and question.is_answered_by(question.answer)
        assert document.prompt(question) == f"{document.text}\n\n{question.text}"
        assert document.prompt(question, question_first=True) == f"{question.text}\n\n{document.text}"


@pytest.mark.parametrize("family", ["single_number", "multi_words", "kv"])
def test_a_question_has_one_answer(family: str) -> None:
    """No other fact of the document could be meant: every question's sentence stands once."""
    document = make_document(family=family, seed=0, count_tokens=words, target_tokens=600)
    assert len({question.text for question in document.questions}) == len(document.questions)
    for question in document.questions:
        start, end = question.spans[0]
        assert document.text.count(document.text[start:end]) == 1


@pytest.mark.parametrize("family", ["kv", "multi_value", "recite", "common_words", "frequent_words", *HIDDEN])
def test_held_out_values_never_occur_in_training(family: str) -> None:
    def values(split: str) -> set[str]:
        found = set()
        for seed in range(40):
            document = make_document(
                family=family, seed=seed, count_tokens=words, target_tokens=300, style=Style(split=split)
            )
            found |= {answer for question in document.questions for answer in question.answers}
        return found

    train, heldout = values("train"), values("heldout")
    assert len(train) > 30 and len(heldout) > 30 and not train & heldout


def test_old_families_keep_their_documents() -> None:
    """Published figures and the shipped models rest on them."""
    document = make_document(family="mixed", seed=5, count_tokens=words, target_tokens=300)
    pinned = repr((document.text, [(q.text, q.answer, q.value, q.family, q.spans) for q in document.questions]))
    assert zlib.crc32(pinned.encode()) == PINNED


def test_several_values_of_a_key_stand_in_different_places() -> None:
    document = make_document(family="multi_value", seed=1, count_tokens=words, target_tokens=400)
    assert len(document.questions) == 4  # keys
    for question in document.questions:
        assert len(set(question.answers)) == 4 and question.answer == ", ".join(question.answers)
        assert list(question.spans) == sorted(question.spans)
        (key,) = {document.text[a:b].removeprefix("The ").split(" is ")[0].split(" ", 2)[2] for a, b in question.spans}
        assert key in question.text


@pytest.mark.parametrize(("family", "default", "num_questions"), [("multi_query", 4, 4), ("recite", 16, 1)])
def test_a_question_names_several_keys(family: str, default: int, num_questions: int) -> None:
    document = make_document(family=family, seed=1, count_tokens=words, target_tokens=400)
    assert len(document.questions) == num_questions
    for question in document.questions:
        pairs = question.answer.split(" ", 2)[2].split(", ")  # after "codes for"
        keys = [pair.rsplit(" ", 1)[0] for pair in pairs]
        assert len(question.answers) == default == len(set(keys)) and ", ".join(keys) in question.text
    spans = [span for question in document.questions for span in question.spans]
    assert len(spans) == len(set(spans))  # questions are about different facts
    two = make_document(
        family=family, seed=1, count_tokens=words, target_tokens=400, num_facts=24, num_answers=3, num_questions=2
    )
    assert [len(question.answers) for question in two.questions] == [3, 3]


def test_scores_are_shares_of_the_answers() -> None:
    (question, *_) = make_document(family="multi_value", seed=1, count_tokens=words, target_tokens=400).questions
    assert question.score(question.answer) == 1.0 and question.score("") == 0.0
    assert question.score(f"It is {question.answers[2]}.") == 0.25
    assert not question.is_answered_by(question.answers[2])


def test_the_words_that_are_asked_for_are_the_most_frequent() -> None:
    for seed in range(5):
        common = make_document(family="common_words", seed=seed, count_tokens=words, target_tokens=800)
        count = Counter(common.text.split())
        assert {word for word, _ in count.most_common(5)} == set(common.questions[0].answers)
        assert count.most_common(6)[5][1] * 5 <= count.most_common(5)[4][1]
        frequent = make_document(family="frequent_words", seed=seed, count_tokens=words, target_tokens=800)
        count = Counter(frequent.text.split())
        assert [word for word, _ in count.most_common(3)] == list(frequent.questions[0].answers)
        assert count.most_common(4)[3][1] < count.most_common(3)[2][1]


@pytest.mark.parametrize(("family", "digits"), [("passkey", 5), ("number_string", 10)])
def test_one_number_hides_in_sentences_that_repeat(family: str, digits: int) -> None:
    document = make_document(family=family, seed=2, count_tokens=words, target_tokens=400)
    (question,) = document.questions
    assert len(question.value) == digits and document.text.count(question.value) == 2
    start, end = question.spans[0]
    rest = Counter((document.text[:start] + document.text[end + 1 :]).strip().split(". "))
    assert len(rest) <= 5 and max(rest.values()) > 5


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="got 'novel'"):
        make_document(family="novel", seed=0, count_tokens=words, target_tokens=100)
    with pytest.raises(ValueError, match="got 'test'"):
        make_document(family="kv", seed=0, count_tokens=words, target_tokens=100, style=Style(split="test"))
    with pytest.raises(ValueError, match="got 2 for 'kv'"):
        make_document(family="kv", seed=0, count_tokens=words, target_tokens=100, num_answers=2)
