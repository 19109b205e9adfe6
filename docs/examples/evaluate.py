"""Evaluation with OpenAI's own client: base models and saved weights, by name.

python evaluate.py --model HuggingFaceTB/SmolLM2-135M-Instruct
python evaluate.py --model tinker://RUN/sampler_weights/rl
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor

import sums
from openai import OpenAI


def main() -> None:
    """Ask every question that no example trains on; print the share of right answers."""
    parser = argparse.ArgumentParser(description="Score a model on sums that were held out.")
    parser.add_argument("--model", default=sums.MODEL)
    args = parser.parse_args()
    client = OpenAI(
        base_url=os.environ["TINKER_BASE_URL"] + "/v1", api_key=os.environ["TINKER_API_KEY"]
    )

    def ask(pair: tuple[int, int]) -> str:
        answer = client.chat.completions.create(
            model=args.model, messages=sums.messages(pair), max_tokens=8, temperature=0
        )
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(ask, sums.HELD_OUT))
    for (x, y), text in zip(sums.HELD_OUT, texts, strict=True):
        print(f"{x} + {y} = {text!r}")
    right = [sums.right(text, pair) for text, pair in zip(texts, sums.HELD_OUT, strict=True)]
    print(f"score {sum(right) / len(right):.3f}  ({sum(right):.0f} of {len(right)})")
    print(f"characters per answer {sum(map(len, texts)) / len(texts):.1f}")


if __name__ == "__main__":
    main()
