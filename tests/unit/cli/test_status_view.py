"""What `tinsmith status` shows, on terminals wide and narrow."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tinsmith.cli import tables
from tinsmith.cli.status_view import render
from tinsmith.overview import facts
from tinsmith.overview.facts import Problem

RUN = "abcdefghijklmnopqrstuvwxyz:train:0"
NASTY = "tra\x1b[31miner-[bold]x"


def overview(**changes):
    service = facts.Service(
        service="trainer", instance="trainer-0a1b2c3d", version="0.1.0",
        base_models=("HuggingFaceTB/SmolLM2-135M-Instruct",),
        load={"models": 3, "room": 5, "busy": 0.42, "waiting": 2}, metrics_url="http://h:1",
    )  # fmt: skip
    run = facts.Run(
        model_id=RUN, session_id="s", owner="o", base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        rank=8, created_s=0, is_live=True, trainer=service.instance, is_held=True, last_op=1234,
        last_op_s=70.0, queued=4, waiting_turns=2, waiting_tokens=4096,
    )  # fmt: skip
    shares = tuple(
        facts.Share(base_model="org/model", pool=pool, messages=5) for pool in ("", "fp8")
    )
    queue = facts.Queue(
        name="samples", stream="TS_SAMPLE", messages=10, size=2048, oldest_s=300.0, shares=shares
    )
    replica = facts.Replica(replica="sampler-a", plane="p", state="active", version=3, behind=2)
    lineage = facts.Lineage(lineage_id=RUN, version=5, epoch=1, replicas=(replica,))
    stream = facts.Stream(name="TS_OPS", kind="work queue", messages=1, size=9, max_bytes=8 << 30)
    broker = facts.Broker(version="2.12.1", rtt_ms=1.5, skew_ms=0, storage=10**9, streams=(stream,))
    known = {
        "at_s": 75.0, "services": (service,), "runs": (run,), "run_count": 9, "queues": (queue,),
        "lineages": (lineage,), "broker": broker,
    }  # fmt: skip
    return facts.Overview(**known | changes)


def shown(found, width, *, is_terminal=False):
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=is_terminal, highlight=False, markup=False
    )
    console.print(render(found, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_longer_than_the_terminal(width):
    assert max(map(len, shown(overview(), width).splitlines())) <= width


@pytest.mark.parametrize("width", [40, 80])
def test_the_essential_is_there_on_any_terminal(width):
    text = shown(overview(), width)

    for word in ("All is well", "trainer-", "1234", "samples", "TS_OPS", "1 live of 9"):
        assert word in text


def test_what_is_told_at_80_columns():
    text = shown(overview(), 80)

    for word in (
        "3 of 8 models, 42% busy", "2 turns", "5 min", "(fp8)", "1 active at 3; up to 2 behind",
        "nats-server 2.12.1", "8.59 GB",
    ):  # fmt: skip
        assert word in " ".join(text.split())


def test_problems_come_first_with_their_remedies():
    problem = Problem(what="no trainer is heard", remedy="start one")
    lines = shown(overview(problems=(problem,)), 80).splitlines()

    assert lines[0].startswith("! no trainer is heard")
    assert lines[1].strip() == "start one"


def test_colours_are_for_terminals_alone():
    assert "\x1b[" not in shown(overview(), 80)
    assert "\x1b[" in shown(overview(), 80, is_terminal=True)


def test_names_cannot_steer_the_terminal():
    service = facts.Service(service="trainer", instance=NASTY, version="1")
    text = shown(overview(services=(service,)), 120)

    assert "\x1b" not in text
    assert "[bold]x" in text


def test_ids_are_shortened_to_what_commands_take():
    first, second = "a" * 26 + ":train:0", "a" * 26 + ":train:1"
    other = "b" * 26 + ":train:0"
    found = tables.short_ids([first, second, other])

    assert found == {first: first, second: second, other: "b" * 8}


@pytest.mark.parametrize(
    ("seconds", "told"), [(-1, "0 s"), (59, "59 s"), (180, "3 min"), (7200, "2 h"), (172800, "2 d")]
)
def test_ages(seconds, told):
    assert tables.age(seconds) == told
