"""The replay of logged samples: each is drawn again and compared, up to the first difference."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from tinsmith.adapters import version_of
from tinsmith.errors import SealBroken, UserError
from tinsmith.messages.base import decoder
from tinsmith.messages.sampling import SampleContent
from tinsmith.sealing import suited
from tinsmith_sampler.differences import Comparison, Difference
from tinsmith_sampler.recording import digests
from tinsmith_sampler.redrawing import departures, open_engine, setting_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tinsmith.config import Config
    from tinsmith.logbook.samples import Samples, StoredSample
    from tinsmith.messages.sampling import SampleDigests, SampleRecord
    from tinsmith.sealing import Seal
    from tinsmith_sampler.redrawing import Redrawing, Setting

AT_ONCE = 32  # requests that are drawn together, so that the engine has full passes

_CONTENTS = decoder(SampleContent)


@dataclass(frozen=True)
class Choice:
    """Which samples are drawn again: all, or a random share of them."""

    share: float | None = None
    seed: int = 0

    def has(self, sample: StoredSample) -> bool:
        """Whether ``sample`` is among them; always the same for one seed."""
        if self.share is None:
            return True
        name = f"{self.seed} {sample.record.request.request_id}".encode()
        return int.from_bytes(blake3(name).digest(8), "little") < self.share * 2**64


@dataclass
class Survey:
    """What there is to draw again, read before anything is computed."""

    samples: int = 0
    digest_only: int = 0
    chosen: int = 0
    settings: Counter[Setting] = field(default_factory=Counter)


async def survey(samples: Samples, run: str, choice: Choice) -> Survey:
    """Read all samples of ``run`` once; LogDamaged when one cannot be read."""
    found = Survey()
    async for sample in samples.stored(run):
        found.samples += 1
        if sample.record.content is None:
            found.digest_only += 1
        elif choice.has(sample):
            found.chosen += 1
            found.settings[setting_of(sample.record)] += 1
    return found


@dataclass(frozen=True)
class Divergence:
    """Where the log and its replay part."""

    request_id: str
    difference: Difference


@dataclass
class Findings:
    """What a replay has found so far."""

    divergence: Divergence | None = None
    samples: int = 0
    sequences: int = 0
    tokens: int = 0
    largest: float = 0.0
    doubts: dict[str, None] = field(default_factory=dict)  # in order of their coming up
    seconds: float = 0.0


class Replay:
    """One replay of the samples of one run."""

    def __init__(
        self,
        samples: Samples,
        run: str,
        choice: Choice,
        *,
        tolerance: float | None = None,
        on_sample: Callable[[], None] = lambda: None,
        on_doubt: Callable[[str], None] = lambda _: None,
    ) -> None:
        """With a ``tolerance`` log-probabilities may differ by it."""
        self.findings = Findings()
        self._samples = samples
        self._run = run
        self._choice = choice
        self._tolerance = tolerance
        self._on_sample = on_sample
        self._on_doubt = on_doubt

    async def run(self, settings: Counter[Setting], config: Config) -> Findings:
        """Draw again and compare, one setting after the other, up to the first divergence.

        Raises:
            LogDamaged: a sample cannot be read.
            BlobMissing: weights are not there any more.
            Forgotten, SealBroken: contents cannot be opened here.
            StartupError, ServerError: see ``open_engine``.
        """
        began = time.monotonic()
        seal = await self._samples.seal(self._run)
        try:
            for setting in settings:
                async with open_engine(setting, self._samples, config) as drawing:
                    await self._pass(setting, drawing, seal)
                if self.findings.divergence is not None:
                    break
        finally:
            self.findings.seconds = time.monotonic() - began
        return self.findings

    async def _pass(self, setting: Setting, drawing: Redrawing, seal: Seal) -> None:
        async for chunk in self._chunks(setting):
            for sample in chunk:
                self._doubt(sample.record, drawing)
            checks = [self._check(sample.record, drawing, seal) for sample in chunk]
            for sample, difference in zip(chunk, await asyncio.gather(*checks), strict=True):
                self._count(sample.record)
                if difference is not None:
                    request_id = sample.record.request.request_id
                    self.findings.divergence = Divergence(request_id, difference)
                    return

    async def _chunks(self, setting: Setting) -> AsyncIterator[list[StoredSample]]:
        chunk: list[StoredSample] = []
        async for sample in self._samples.stored(self._run):
            record = sample.record
            if record.content is None or setting_of(record) != setting:
                continue
            if self._choice.has(sample):
                chunk.append(sample)
            if len(chunk) == AT_ONCE:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _doubt(self, record: SampleRecord, drawing: Redrawing) -> None:
        for doubt in departures(record.environment, drawing.environment):
            if doubt not in self.findings.doubts:
                self.findings.doubts[doubt] = None
                self._on_doubt(doubt)

    def _count(self, record: SampleRecord) -> None:
        self.findings.samples += 1
        self.findings.sequences += len(record.digests.sequences)
        self.findings.tokens += sum(one.length for one in record.digests.sequences)
        self._on_sample()

    async def _check(
        self, record: SampleRecord, drawing: Redrawing, run_seal: Seal
    ) -> Difference | None:
        seal = _seal_of(record, run_seal)
        adapter = record.request.adapter
        if adapter is not None and adapter.version != (found := version_of(adapter.files)):
            return Difference("adapter.version", adapter.version, found)
        try:
            content = _content(record, seal)
        except SealBroken as exc:
            return Difference("content", "what was logged", str(exc))
        # First, or another prompt would look like another answer.
        if (found := seal.digest(content.prompt)) != record.digests.prompt:
            return Difference("digests.prompt", record.digests.prompt, found)
        try:
            drawn = await drawing.redraw(record, content)
        except UserError as exc:
            return Difference("answer", "an answer", str(exc))
        comparison = Comparison(self._tolerance)
        difference = comparison.first(content, drawn)
        self.findings.largest = max(self.findings.largest, comparison.largest)
        return difference or between_digests(record.digests, digests(content, seal))


def between_digests(expected: SampleDigests, found: SampleDigests) -> Difference | None:
    """The first field in which a record does not describe what it holds."""
    left, right = _flat("digests", expected), _flat("digests", found)
    for name in left | right:
        if left.get(name) != right.get(name):
            return Difference(name, str(left.get(name)), str(right.get(name)))
    return None


def _flat(name: str, value: object) -> dict[str, object]:
    if isinstance(value, msgspec.Struct):
        parts = {f"{name}.{one}": getattr(value, one) for one in value.__struct_fields__}
    elif isinstance(value, tuple):
        parts = {f"{name}[{index}]": one for index, one in enumerate(value)}
    else:
        return {name: value}
    return {key: leaf for part, one in parts.items() for key, leaf in _flat(part, one).items()}


def _seal_of(record: SampleRecord, run_seal: Seal) -> Seal:
    """What opens ``record``; Forgotten or SealBroken when nothing here does."""
    seal = suited(run_seal, record.sealed)
    if seal.why_closed is not None:
        raise seal.why_closed
    return seal


def _content(record: SampleRecord, seal: Seal) -> SampleContent:
    """What ``record`` holds; SealBroken when it is not what was sealed, or not a content."""
    try:
        content: SampleContent = _CONTENTS.decode(seal.open(record.content or b""))
    except msgspec.MsgspecError as exc:
        raise SealBroken(f"not the content of a sample ({exc})") from exc
    return content
