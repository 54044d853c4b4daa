"""Generated documents say what they claim: same seed same text, true spans, lengths kept, held-out keys unseen."""

from __future__ import annotations

import pytest

from snapstream.assets.documents import FAMILIES, make_document


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
        start, end = question.spans[0]
        assert question.value in document.text[start:end] or family in ("variable", "mixed")
        assert any(question.value in document.text[a:b] for a, b in question.spans)
        assert question.value in question.answer and question.text
        assert document.prompt(question).endswith(question.text)


@pytest.mark.parametrize("family", ["single_number", "multi_words", "kv"])
def test_a_question_has_one_answer(family: str) -> None:
    """No other fact of the document could be meant: every question's sentence stands once."""
    document = make_document(family=family, seed=0, count_tokens=words, target_tokens=600)
    assert len({question.text for question in document.questions}) == len(document.questions)
    for question in document.questions:
        start, end = question.spans[0]
        assert document.text.count(document.text[start:end]) == 1


def test_held_out_values_never_occur_in_training() -> None:
    def values(split: str) -> set[str]:
        found = set()
        for seed in range(40):
            document = make_document(family="kv", seed=seed, count_tokens=words, target_tokens=300, split=split)
            found |= {question.value for question in document.questions}
        return found

    train, heldout = values("train"), values("heldout")
    assert len(train) > 500 and len(heldout) > 500 and not train & heldout


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="got 'novel'"):
        make_document(family="novel", seed=0, count_tokens=words, target_tokens=100)
    with pytest.raises(ValueError, match="got 'test'"):
        make_document(family="kv", seed=0, count_tokens=words, target_tokens=100, split="test")
