"""Rows inside transformers' own `generate`: memory after the prompt no longer grows with it.

python examples/transformers_cache.py --model Qwen3-0.6B/ --budget 1024
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from snapstream.assets import TINY_MODEL
from snapstream.integrations.transformers import SnapStreamCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(TINY_MODEL))
    parser.add_argument("--budget", type=int, default=128)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    filler = "The sky over the harbor was grey that day. " * 20
    text = f"The code of the vault is 4821907. {filler}\n\nWhat is the code of the vault?"
    messages = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    for cache in (DynamicCache(config=model.config), SnapStreamCache(model.config, budget=args.budget)):
        answer = model.generate(**inputs, past_key_values=cache, max_new_tokens=16, do_sample=False)
        tokens = cache.layers[0].keys.shape[2]
        print(f"{type(cache).__name__}: {tokens} tokens per layer,", end=" ")
        print(repr(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])))


if __name__ == "__main__":
    main()
