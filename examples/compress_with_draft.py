"""A small draft model reads the prompt first and removes what the question does not need.

python examples/compress_with_draft.py --model Llama-3.1-8B-Instruct/ --draft Qwen3-0.6B/ --keep 0.25
"""

import argparse

from snapstream import LLM, PromptCompression, SamplingParams
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.assets.documents import make_document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(TINY_MODEL))
    parser.add_argument("--draft", default=str(TINY_DRAFT_MODEL))
    parser.add_argument("--keep", type=float, default=0.25)
    args = parser.parse_args()
    with LLM(args.model, budget=512, draft=args.draft, progress=False) as llm:
        document = make_document(
            family="single_words",
            seed=4,
            count_tokens=lambda text: len(llm.tokenizer(text)["input_ids"]),
            target_tokens=2000,
        )
        question = document.questions[0]
        messages = [{"role": "user", "content": document.text}, {"role": "user", "content": question.text}]
        params = SamplingParams(max_tokens=32, temperature=0.0)
        how = PromptCompression(keep=args.keep)
        (output,) = llm.chat(messages, params, prompt_compression=how)
    print("expected:", question.answer)
    print("answer:", output.text)
    print("draft:", output.prompt_compression)
    print(f"prompt {output.num_prompt_tokens:,} tokens, prefilled {len(output.prompt_token_ids):,}")


if __name__ == "__main__":
    main()
