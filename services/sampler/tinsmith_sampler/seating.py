"""Who holds room in the KV cache and who waits for it.

Tasks wait in a queue, first come first served. The first one is seated when there is room for its
prompt and for the beginning of its row. Rows take more room as they grow; if there is none, the
youngest task is sent back to the head of the queue. Its row draws the same tokens again when its
turn comes, then with room for all of them, so that it happens to it once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tinsmith_sampler.kv_cache import whole_pages
from tinsmith_sampler.prompts import Prompt, PromptCache
from tinsmith_sampler.scores import ScoreTask
from tinsmith_sampler.tasks import RowTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith_sampler.kv_cache import Extent, KvCache

AnyTask = RowTask | ScoreTask


class Seating:
    """The waiting and the seated tasks, and the prompts that they share."""

    def __init__(self, cache: KvCache, max_rows: int) -> None:
        self.prompts = PromptCache(cache)
        self.seated: list[AnyTask] = []  # in the order in which they were seated
        self._waiting: deque[AnyTask] = deque()
        self._cache = cache
        self._max_rows = max_rows
        self._arrivals = 0

    def __iter__(self) -> Iterator[AnyTask]:
        """All tasks; they may leave while this is iterated over."""
        return iter([*self.seated, *self._waiting])

    @property
    def started_rows(self) -> list[RowTask]:
        """The rows that decode."""
        return [task for task in self.seated if isinstance(task, RowTask) and task.is_started]

    def arrive(self, task: AnyTask) -> None:
        """Put a task at the end of the queue."""
        task.age = self._arrivals
        self._arrivals += 1
        self._waiting.append(task)

    def seat_waiting(self) -> None:
        """Seat tasks from the head of the queue as long as there is room."""
        while self._waiting and len(self.seated) < self._max_rows:
            if not self._seat(self._waiting[0]):
                break
            self.seated.append(self._waiting.popleft())

    def leave(self, task: AnyTask) -> None:
        """Take a task out and give back what it held."""
        if task in self.seated:
            self.seated.remove(task)
        else:
            self._waiting.remove(task)
        self._vacate(task)

    def begin_row(self, task: RowTask, prompt: Prompt, extent: Extent) -> None:
        """Copy the computed prompt into the row's own room; the row needs the prompt no longer."""
        self._cache.copy(prompt.extent, extent, len(task.tokens))
        self._release_prompt(task)

    def make_room(self) -> None:
        """Room for the newest token of every started row, the oldest rows first."""
        for task in sorted(self.started_rows, key=lambda one: one.age):
            while task.extent is not None and task.extent.size <= task.position:
                self._evict_for(task.next_room)
                if not self._cache.grow(task.extent, task.next_room):
                    self._send_back(max(self.seated, key=lambda one: one.age))

    def _seat(self, task: AnyTask) -> bool:
        """Give a task its prompt and, if it is a row, its own room; False when there is none."""
        prompt = self._prompt_for(task)
        if prompt is None:
            return False
        prompt.users += 1
        task.prompt = prompt
        if isinstance(task, RowTask):
            task.extent = self._room(task.first_room)
            if task.extent is None:
                self._release_prompt(task)
                return False
        return True

    def _prompt_for(self, task: AnyTask) -> Prompt | None:
        """The prompt of a task, shared or new; None without room.

        A score needs logits that others let go, so it always computes its own.
        """
        if isinstance(task, RowTask):
            found = self.prompts.find(task.tokens, task.version)
            if found is not None:
                task.cached_tokens = len(task.tokens)
                return found
        extent = self._room(len(task.tokens))
        if extent is None:
            return None
        prompt = Prompt(task.tokens, task.version, extent, task.needs_from)
        self.prompts.enter(prompt)
        task.cached_tokens = prompt.reused
        return prompt

    def _room(self, tokens: int) -> Extent | None:
        self._evict_for(tokens)
        return self._cache.take(tokens)

    def _evict_for(self, tokens: int) -> None:
        """Let idle prompts go when the end of the cache is reached.

        What stays is moved together then, so enough must go for that to be rare.
        """
        if self._cache.has_at_end(tokens):
            return
        wanted = max(whole_pages(tokens), self._cache.capacity // 4)
        while self._cache.free < wanted and self.prompts.evict():
            pass

    def _vacate(self, task: AnyTask) -> None:
        self._release_prompt(task)
        if isinstance(task, RowTask) and task.extent is not None:
            self._cache.give(task.extent)
            task.extent = None

    def _release_prompt(self, task: AnyTask) -> None:
        if task.prompt is not None:
            self.prompts.release(task.prompt)
            task.prompt = None

    def _send_back(self, task: AnyTask) -> None:
        self.seated.remove(task)
        self._vacate(task)
        task.restart()
        self._waiting.appendleft(task)
