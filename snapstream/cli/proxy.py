"""``snapstream proxy``: options to a running proxy (``proxy/app.py``). Torch is imported only when it runs."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from snapstream.cli.flags import DraftFlags
from snapstream.proxy.options import ProxyOptions
from snapstream.server.options import all_keys, answered_hosts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor

HELP = """Compress long prompts with a small draft model, in front of any OpenAI-compatible server.

Answers pass through untouched; the header x-snapstream-prompt-compression says what was done to the prompt.

\b
Examples:
  snapstream proxy --upstream http://localhost:8000 --keep 0.25
  snapstream proxy --upstream https://api.example.com/v1 --draft Qwen3-0.6B/ --max-tokens 16384 --target Llama-3.1-8B/
"""


def proxy(options: ProxyOptions, draft: DraftFlags) -> None:
    try:
        from snapstream.proxy.app import run_proxy
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; in a checkout run: pip install '.[serve]'") from None
    from snapstream.server.http.lifecycle import listen, set_up_log
    from snapstream.spec_prefill.settings import chunks_of, protection_of, scoring_of

    options = replace(
        options,
        api_keys=all_keys(options.api_keys, options.api_key_file),
        allowed_hosts=answered_hosts(options.host, options.allowed_hosts),
    )
    set_up_log("text")
    for name in ("httpx", "httpcore"):  # httpx logs whole URLs, and a query may hold a key
        logging.getLogger(name).setLevel(logging.WARNING)
    scoring = scoring_of(options.look_ahead, draft.context_len, refuse_longer=draft.refuse_longer)
    chunks = chunks_of(draft.chunk_len)

    def load() -> tuple[PromptCompressor, PreTrainedTokenizerBase | None]:
        from snapstream.models.tokenizer import load_tokenizer
        from snapstream.spec_prefill.compressor import PromptCompressor

        compressor = PromptCompressor(
            draft.folder,
            scoring=scoring,
            chunks=chunks,
            protection=protection_of(options.threshold),
            dtype=draft.dtype,
            device=draft.device,
        )
        return compressor, None if options.target is None else load_tokenizer(options.target)

    with listen(options.host, options.port) as listener:  # a taken port fails before anything is loaded
        run_proxy(load, options, listener)
