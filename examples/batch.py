"""Many prompts at once, each with its own sampling parameters; short answers do not wait for long ones.

python examples/batch.py --model Qwen3-0.6B/ --max-rows 16
"""

import argparse

from snapstream import LLM, Grammar, SamplingParams
from snapstream.assets import TINY_MODEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(TINY_MODEL))
    parser.add_argument("--max-rows", type=int, default=4)
    args = parser.parse_args()
    numbers = range(4821907, 4821913)
    chats = [
        [{"role": "user", "content": f"The ticket of dense arrow is {n}.\n\nWhat is the ticket of dense arrow?"}]
        for n in numbers
    ]
    params = [
        SamplingParams(max_tokens=16, temperature=0.0),
        SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=7),
        SamplingParams(max_tokens=16, n=2, temperature=1.0, seed=7),
        SamplingParams(max_tokens=16, stop=["."]),
        SamplingParams(max_tokens=16, grammar=Grammar.choice(["yes", "no"])),
        SamplingParams(max_tokens=16, logprobs=1, temperature=0.0),
    ]
    with LLM(args.model, budget=128, max_rows=args.max_rows, progress=False) as llm:
        for output in llm.chat(chats, params):
            for sample in output.samples:
                end = f"{sample.finish_reason}, {output.timings.total_ms:.0f} ms"
                print(f"{output.request_id}: {sample.text!r} ({end})")


if __name__ == "__main__":
    main()
