"""Models that fail again and again, and when to stop trying. Pure.

A failure that nobody foresaw may be gone at the next try. One that comes back without the model
having got any further is there to stay, and its clients must hear of it instead of waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.errors import BrokerUnavailable, StorageFull

_OF_OTHERS = (BrokerUnavailable, StorageFull)  # they say nothing about the model
MAX_TRIES = 4
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 30.0


@dataclass
class _Trouble:
    tries: int = 0
    reason: str = ""
    reached: int = 0  # the next seq at the time


class Troubles:
    """How often each model failed since it last got on."""

    def __init__(self) -> None:
        self._by_model: dict[str, _Trouble] = {}

    def add(self, model_id: str, error: Exception) -> float:
        """Note a failure; how long to wait before the next try, in seconds."""
        trouble = self._by_model.setdefault(model_id, _Trouble())
        if not isinstance(error, _OF_OTHERS):
            trouble.tries += 1
            trouble.reason = f"{type(error).__name__}: {error}"
        return min(FIRST_PAUSE_S * 2.0**trouble.tries, LONGEST_PAUSE_S)

    def reached(self, model_id: str, next_seq: int) -> None:
        """The model stands at ``next_seq``: if that is further than before, all is well."""
        trouble = self._by_model.get(model_id)
        if trouble is not None and next_seq > trouble.reached:
            trouble.tries, trouble.reached = 0, next_seq

    def why_give_up(self, model_id: str) -> str | None:
        """What to tell the model's clients when it is no use to try again."""
        trouble = self._by_model.get(model_id)
        if trouble is None or trouble.tries < MAX_TRIES:
            return None
        return (
            f"this model failed {trouble.tries} times at the same place ({trouble.reason}); "
            "the trainer's log has the details; continue from a saved checkpoint"
        )

    def forget(self, model_id: str) -> None:
        """The model is gone."""
        self._by_model.pop(model_id, None)
