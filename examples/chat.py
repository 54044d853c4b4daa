"""A conversation in the terminal: answers stream, and later turns compute only what is new.

python examples/chat.py --model Qwen3-0.6B/ --budget 4096
"""

import argparse
import sys

from snapstream import LLM, SamplingParams
from snapstream.assets import TINY_MODEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(TINY_MODEL))
    parser.add_argument("--budget", type=int, default=512)
    args = parser.parse_args()
    messages: list[dict[str, str]] = []
    with LLM(args.model, budget=args.budget, prefix_store="64MiB", progress=False) as llm:
        for line in sys.stdin:  # a turn per line; end with Ctrl-D
            messages.append({"role": "user", "content": line.strip()})
            shown = ""
            for output in llm.stream(llm.chat_token_ids(messages), SamplingParams(max_tokens=64, temperature=0.0)):
                print(output.text[len(shown) :], end="", flush=True)
                shown = output.text
            print()
            messages.append({"role": "assistant", "content": shown})


if __name__ == "__main__":
    main()
