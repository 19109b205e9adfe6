"""What the commands of ``tinsmith log`` do; each returns its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tinsmith import config, logs
from tinsmith.cli.progress import progress
from tinsmith.errors import InvalidRequest, TinsmithError
from tinsmith.logbook import LogDamaged, lines, open_logbook, sample_lines, transfer
from tinsmith.logbook.anchors import place_in_words, told
from tinsmith.logbook.file import FileLogbook
from tinsmith.logbook.overview import Overview, overview
from tinsmith.logbook.pruned import sentence
from tinsmith.logbook.samples import FileSamples, open_samples
from tinsmith.logbook.source import is_file, open_run, resolve_run
from tinsmith.logbook.text import plain, short, size
from tinsmith.logbook.verify import Verification
from tinsmith.sealing import Seals
from tinsmith.sealing.seal import moment

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from pathlib import Path

    from tinsmith.config import Config
    from tinsmith.logbook import Logbook
    from tinsmith.logbook.anchors import Chain
    from tinsmith.messages.anchors import PrunedLog

    Main = Callable[[Config], Coroutine[Any, Any, int]]

OK, FOUND, FAILED = 0, 1, 2
MAX_MESSAGE = 1000
_DIGEST = re.compile(r"[0-9a-f]{16,64}")


class Span(NamedTuple):
    """From one op to another, both included."""

    first: int = 0
    last: int | None = None


def run(name: str, path: Path | None, data_dir: Path | None, main: Main) -> int:
    """Run one command to its end; see ``tinsmith log --help`` for the exit codes.

    Whatever goes wrong is 2: a check that broke must not look like one that found something.
    """
    try:
        return asyncio.run(main(_load(path, data_dir)))
    except TinsmithError as error:
        # Logs from elsewhere are quoted in it.
        logs.report(f"log {name}", TinsmithError(plain(error, MAX_MESSAGE)))
        return FOUND if isinstance(error, LogDamaged) else FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"tinsmith log {name}: interrupted\n")
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception:  # noqa: BLE001 - the process's border, told in full
        traceback.print_exc()
    return FAILED


def _load(path: Path | None, data_dir: Path | None) -> Config:
    environ = dict(os.environ)
    if data_dir is not None:
        environ["TINSMITH_DATA_DIR"] = str(data_dir.absolute())
    loaded = config.load(path, environ)
    logs.configure(loaded.logs, service="log", instance="log")
    return loaded


async def ls(loaded: Config, file: Path | None) -> int:
    """One line per run."""
    rows = []
    async with open_logbook(None if file is None else str(file), loaded) as book:
        runs = await book.runs()
        with progress("Reading logs", len(runs)) as advance:
            for model_id in runs:
                rows.append(await overview(book, model_id))
                advance()
        for model_id, gone in (await book.pruned()).items():
            when = f"pruned on {moment(gone.pruned_ns)}"
            rows.append(Overview(model_id, head_blake3=gone.head.blake3, closed=when))
    for row in _table(rows):
        _say(row)
    return OK


async def show(loaded: Config, target: str, span: Span, *, is_json: bool) -> int:
    """One line per entry."""
    async with open_run(target, loaded) as (book, model_id):
        if not is_json:
            _say(lines.HEADER)
        async for told in lines.facts(book, model_id, first=span.first, last=span.last):
            _say(msgspec.json.encode(told).decode() if is_json else lines.line(told))
    return OK


async def show_samples(loaded: Config, target: str, span: Span, *, is_json: bool) -> int:
    """One line per logged sample."""
    if span != Span():
        raise InvalidRequest("--samples: all are shown; drop --from and --to, which count ops")
    async with open_samples(target, loaded) as (samples, run_id):
        if not is_json:
            _say(sample_lines.HEADER)
        async for told in sample_lines.facts(samples, run_id):
            _say(msgspec.json.encode(told).decode() if is_json else sample_lines.line(told))
    return OK


async def verify(loaded: Config, target: str | None, *, is_all: bool, head: str) -> int:
    """The verdict on one run or on all."""
    if (target is None) != is_all or (is_all and head):
        raise InvalidRequest("verify: give a run or a file, with --head or without; or --all")
    if head and not _DIGEST.fullmatch(head):
        raise InvalidRequest(f"--head: {head[:80]!r} is not 16 to 64 hexadecimal digits")
    async with open_logbook(target if target and is_file(target) else None, loaded) as book:
        with progress("Reading anchors", None):
            chain = await book.anchors()
        # What was anchored and has no log any more is a run as well.
        runs = sorted({*await book.runs(), *chain.heads})
        if target is not None:
            runs = [runs[0] if is_file(target) else resolve_run(runs, target)]
        verdicts = [await _verdict(book, model_id, head, chain) for model_id in runs]
    if chain.damage is not None:
        _say(f"anchors: damaged: {plain(chain.damage, MAX_MESSAGE)}")
        return FOUND
    if is_all:
        _say(f"anchors: verified, {_count(chain.length, 'anchor')}")
        _say(f"  last anchor {chain.blake3}")
    return max(verdicts, default=OK)


def _pruned(gone: PrunedLog, head: str) -> int:
    """Of a log that anchors say was taken away: nobody can tell any more whether it was whole."""
    if not gone.head.blake3.startswith(head):
        raise InvalidRequest(
            f"--head: {gone.model_id}: {sentence(gone)}; of all its entries only the digest of "
            f"that one is known any more, {plain(gone.head.blake3)}"
        )
    _say(f"{gone.model_id}: pruned: {sentence(gone)}")
    _say(f"  last entry {plain(gone.head.blake3)}")
    return OK


async def _taken(book: Logbook, model_id: str, chain: Chain) -> PrunedLog | None:
    """What anchors say of a log of which nothing is there; what is there can be verified."""
    gone = chain.pruned.get(model_id)
    return None if gone is None or await book.length(model_id) else gone


async def _verdict(book: Logbook, model_id: str, head: str, chain: Chain) -> int:
    if gone := await _taken(book, model_id, chain):
        return _pruned(gone, head)
    verification = Verification(book, model_id)
    has_head = not head
    try:
        with progress(f"Verifying {model_id}", await book.length(model_id)) as advance:
            async for entry in verification.entries():
                has_head = has_head or entry.blake3.startswith(head)
                advance()
    except LogDamaged as error:
        # It may have been pruned since the anchors were read.
        if gone := await _taken(book, model_id, await book.anchors(is_fresh=True)):
            return _pruned(gone, head)
        _say(f"{model_id}: damaged: {plain(error, MAX_MESSAGE)}")
        return FOUND
    if not has_head:
        problem = "its end was cut off, or it is another log"
        _say(f"{model_id}: damaged: no entry has the digest {head}: {problem}")
        return FOUND
    _say_verified(model_id, verification, chain)
    return OK


def _say_verified(model_id: str, verification: Verification, chain: Chain) -> None:
    _say(f"{model_id}: verified, {_summary(verification)}")
    _say(f"  last entry {verification.rules.head}")
    _say(f"  last state {plain(verification.rules.state) or '-'}")
    if anchored := chain.of(model_id):
        last = anchored[-1]
        _say(f"  last anchored: {place_in_words(last.head.place)}, in {told(last)}")
    _say_closed(verification)
    if model_id in chain.pruned:
        _say("  its pruning was begun; the checkpointer or 'tinsmith gc' ends it")


async def export(
    loaded: Config, target: str, path: Path, *, overwrite: bool, has_samples: bool, has_key: bool
) -> int:
    """A run in a file."""
    async with contextlib.AsyncExitStack() as stack:
        book, model_id = await stack.enter_async_context(open_run(target, loaded))
        samples = None
        if has_samples:
            samples, _ = await stack.enter_async_context(open_samples(target, loaded))
        advance = stack.enter_context(
            progress(f"Exporting {model_id}", await book.length(model_id))
        )
        verification = await transfer.export(
            *(book, model_id, path),
            overwrite=overwrite,
            on_entry=advance,
            samples=samples,
            has_key=has_key,
        )
    _say(f"{path}: {_summary(verification)}; {_size_of(path)} packed")
    _say(f"  last entry {verification.rules.head}")
    _say_closed(verification)
    return OK


async def import_(loaded: Config, path: Path, *, resume: bool) -> int:
    """A file in the installation."""
    from tinsmith.logbook.installation import connect

    async with open_logbook(str(path), loaded) as book:
        (model_id,) = await book.runs()
        length = await book.length(model_id)
        verification = Verification(book, model_id)
        with progress(f"Verifying {path}", length) as advance:
            async for _ in verification.entries():
                advance()
        async with connect(loaded, name="log-import") as (bus, blobs):
            if (gone := await bus.pruning.of(model_id)) is not None:
                raise InvalidRequest(
                    f"run: {model_id}: {sentence(gone)}; the file can be read by itself"
                )
            with progress(f"Importing {model_id}", length) as advance:
                importing = transfer.Import(bus.log, blobs, Seals(bus, loaded), on_entry=advance)
                await importing.run(book, model_id, resume=resume)
            if isinstance(book, FileLogbook):
                await transfer.import_samples(FileSamples(book), model_id, bus.samples)
    _say(f"{model_id}: imported, {_summary(verification)}")
    _say_closed(verification)
    return OK


async def diff(loaded: Config, a: str, b: str) -> int:
    """The first difference of two runs."""
    from tinsmith.logbook.compare import Side, compare  # numpy, which nothing else here needs

    async with open_run(a, loaded) as left, open_run(b, loaded) as right:
        with progress("Comparing ops", None) as advance:
            outcome = await compare(Side(*left), Side(*right), on_op=advance)
    found = outcome.difference
    if found is None:
        _say(f"equal: {outcome.equal_ops} ops")
        return OK
    _say(f"{outcome.equal_ops} ops are equal; op {found.seq} differs:")
    for field, of_a, of_b in ((found.field, found.a, found.b), *found.environments):
        _say(f"  {plain(field)}: {plain(of_a)} in A, {plain(of_b)} in B")
    return FOUND


def _say_closed(verification: Verification) -> None:
    if verification.why_closed is not None:
        _say(f"  contents not checked: {plain(verification.why_closed, MAX_MESSAGE)}")


def _summary(verification: Verification) -> str:
    rules, blobs = verification.rules, verification.blobs
    told = f"{_count(rules.number, 'entry')}, {_count(rules.ops, 'op')} by "
    told += f"{_count(rules.epoch, 'owner')}, {_count(len(blobs), 'blob')} of "
    told += size(sum(blobs.values()))
    told += f", {_count(verification.samples, 'sample')}" if verification.samples else ""
    return told + (f"; {_count(rules.missing, 'request')} never came" if rules.missing else "")


def _count(number: int, noun: str) -> str:
    plural = "entries" if noun == "entry" else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _size_of(path: Path) -> str:
    return size(path.stat().st_size)


def _table(rows: Sequence[Overview]) -> Iterator[str]:
    width = max([len(plain(row.base_model)) for row in rows], default=0)
    width = max(width, len("base model"))
    yield f"{'run':<36} {'base model':<{width}} {'last op':>8} {'owners':>7}  last entry"
    for row in rows:
        last_op = "-" if row.last_op is None else row.last_op
        line = f"{row.model_id:<36} {plain(row.base_model):<{width}} {last_op:>8} {row.owners:>7}"
        line += f"  {short(row.head_blake3):<10}"
        line += f"  {row.closed}" if row.closed else ""
        yield (line + (f"  damaged: {plain(row.damage)}" if row.damage else "")).rstrip()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
