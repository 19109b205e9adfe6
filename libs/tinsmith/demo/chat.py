"""Questions and answers as tokens, in the model's own chat format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tinker import types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.demo.data import Example

# Given because the template has a longer one of its own; says nothing about the style.
SYSTEM = "You answer questions."


class Chat:
    """A tokenizer with a chat template, as ``TrainingClient.get_tokenizer`` returns it."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers gives it no type
        self._tokenizer = tokenizer

    def prompt(self, question: str) -> list[int]:
        """Tokens up to where the answer begins."""
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ]
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self._tokens(text)

    def datum(self, example: Example) -> types.Datum:
        """Trains on the answer and the token that ends it, not on the prompt.

        n tokens predict n tokens: ``target_tokens`` int64 [n] and ``weights`` float32 [n].
        """
        prompt = self.prompt(example.question)
        answer = [*self._tokens(example.answer), self._tokenizer.eos_token_id]
        tokens = prompt + answer
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
                "weights": types.TensorData.from_numpy(np.array(weights, np.float32)),
            },
        )

    def text(self, tokens: Sequence[int]) -> str:
        """What was sampled, without the token that ended it."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
