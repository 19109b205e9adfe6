"""The in-memory view of a registry table."""

from __future__ import annotations

import pytest

from tinsmith import ids
from tinsmith.bus.views import View
from tinsmith.messages.registry import Session
from tinsmith.messages.table import SESSIONS


def session(owner="a"):
    return Session(session_id=ids.new_session_id(), owner=owner, created_ns=1)


@pytest.fixture
def view(fake):
    return View(fake.table(SESSIONS), lambda s: s.owner)


def test_entries_are_listed_in_their_group(view):
    one, two, other = session(), session(), session("b")
    for key, value in (("1", one), ("2", two), ("3", other)):
        view.apply(key, value)

    assert {s.session_id for s in view.group("a")} == {one.session_id, two.session_id}
    assert len(list(view)) == 3


def test_a_change_replaces_the_entry_and_may_move_it(view):
    view.apply("1", session("a"))
    view.apply("1", session("b"))

    assert (len(view.group("a")), len(view.group("b"))) == (0, 1)


def test_a_deletion_removes_the_entry(view):
    view.apply("1", session())
    view.apply("1", None)

    assert (view.group("a"), list(view)) == ((), [])


def test_a_deletion_of_what_is_not_there_is_harmless(view):
    view.apply("1", None)

    assert list(view) == []


async def test_an_entry_that_the_watch_has_not_brought_is_asked_for(view, fake):
    written = session()
    await fake.table(SESSIONS).put("1", written)

    assert await view.get("1") == written


async def test_an_entry_that_the_watch_has_brought_is_not_asked_for(view, fake):
    await fake.table(SESSIONS).put("1", session())
    watch = await view.watch()
    reads = fake.reads

    assert await view.get("1") is not None
    assert fake.reads == reads
    await watch.close()
