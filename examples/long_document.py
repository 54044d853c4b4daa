"""A question over a document that is many times longer than the row.

python examples/long_document.py --model Llama-3.2-1B-Instruct/ --file report.txt --question "Who signed it?"
"""

import argparse
from pathlib import Path

from snapstream import LLM, SamplingParams
from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import make_document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(TINY_MODEL))
    parser.add_argument("--file", type=Path, help="default: a generated document whose answer is known")
    parser.add_argument("--question", default="")
    parser.add_argument("--budget", type=int, default=256)
    args = parser.parse_args()
    with LLM(args.model, budget=args.budget, progress=False) as llm:
        if args.file is not None:
            prompt = f"{args.file.read_text()}\n\n{args.question}"
        else:
            document = make_document(
                family="single_number",
                seed=1,
                count_tokens=lambda text: len(llm.tokenizer(text)["input_ids"]),
                target_tokens=2000,
            )
            prompt = document.prompt(document.questions[0])
            print("expected:", document.questions[0].answer)
        params = SamplingParams(max_tokens=64, temperature=0.0, return_kept=True)
        (output,) = llm.chat([{"role": "user", "content": prompt}], params)
    kept = output.compression
    print("answer:", output.text)
    print(f"prompt {kept.prompt_tokens:,} tokens, row {kept.kept_tokens:,} slots: {kept.row_bytes:,} bytes")
    print(f"a full cache would take {kept.full_bytes:,} bytes")
    if kept.kept_positions is not None:
        print("selected by layer 0, head 0:", kept.kept_positions[0][0][:8], "...")


if __name__ == "__main__":
    main()
