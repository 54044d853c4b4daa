"""A client of `snapstream serve`: text as it arrives, then usage and what the row kept.

snapstream serve Qwen3-0.6B/ --budget 4096 &
python examples/streaming_client.py --url http://127.0.0.1:8000/v1 "Why is the sky blue?"
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none")
    parser.add_argument("--budget", type=int, default=64)
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.key)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.question}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=64,
        extra_body={"kv_cache": {"budget": args.budget}},  # this request's own row
    )
    facts = None
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
            facts = getattr(chunk, "snapstream", None) or facts
        elif chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} output tokens")
    print("row:", facts)


if __name__ == "__main__":
    main()
