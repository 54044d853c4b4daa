"""The report on chains finds the tokens of a link, and says what of them a row kept."""

from __future__ import annotations

from evals.chains import make_prompts, report
from evals.chat import Chat
from snapstream.assets import TINY_MODEL
from snapstream.config import KVBudget
from snapstream.llm import LLM
from snapstream.request import SamplingParams


def test_links_are_found_and_their_share_is_counted() -> None:
    chat = Chat(TINY_MODEL)
    prompts = make_prompts(chat, 6, 400)
    for question, ids, links in prompts:
        texts = ["".join(chat.token_texts([ids[t] for t in link])) for link in links]
        assert all(text.strip().startswith("Let ") and text.endswith(".") for text in texts)
        assert question.answers[-1] in texts[-1]
    budget = KVBudget.of(96)
    with LLM(TINY_MODEL, budget=budget, max_model_len=432, progress=False) as llm:
        params = SamplingParams(max_tokens=1, return_kept=True)
        found = report(prompts, llm.generate([ids for _, ids, _ in prompts], params), budget)
    assert sum(found["prompts_by_links"].values()) == 6
    shares = [share for layers in found["kept_by_link"].values() for heads in layers for share in heads]
    assert len(found["kept_by_link"][0]) == 4 and all(0 <= share <= 100 for share in shares)
    assert max(found["kept_by_link"][0][1]) > 90  # the layer that looks things up has the link that is asked for
