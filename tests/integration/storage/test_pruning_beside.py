"""What happens beside the pruning of a log: another checkpointer, savers, readers."""

from __future__ import annotations

import pytest
import structlog
from tests.integration.storage.test_pruning import (
    MONTH,
    config,
    ended_run,
    pruner,
    saved,
    verified,
)

from tinsmith import ids
from tinsmith.cli import log_commands
from tinsmith.errors import Gone
from tinsmith.logbook.broker import BrokerLogbook
from tinsmith.messages import table
from tinsmith_checkpointer import holds
from tinsmith_checkpointer.pruning import Pruner

__all__ = ("config", "pruner")


async def test_two_that_prune_at_once_prune_once(bus, blobs, config, pruner, monkeypatch):
    run = await ended_run(bus, blobs)
    plan = await pruner.plan()
    real = bus.log.newest

    async def after_the_other(model_id):
        monkeypatch.undo()
        await Pruner(bus, MONTH, structlog.get_logger(), instance="other").go_round()
        return await real(model_id)

    monkeypatch.setattr(bus.log, "newest", after_the_other)
    assert await pruner.carry_out(plan) == 0
    assert (await bus.pruning.of(run)).by == "other"
    assert await verified(config) == 0


async def test_what_was_saved_while_it_was_planned_holds_its_log(bus, blobs, pruner, monkeypatch):
    run = await ended_run(bus, blobs)
    real = holds._is_wanted

    async def saved_meanwhile(bus, model_id):
        await saved(bus, run)
        return await real(bus, model_id)

    monkeypatch.setattr(holds, "_is_wanted", saved_meanwhile)
    assert (await pruner.plan()).fates[run] == "checkpoints"
    assert await pruner.carry_out(await pruner.plan()) == 0


async def test_a_log_that_goes_while_all_are_verified_is_not_called_damaged(
    bus, blobs, config, pruner, monkeypatch, capsys
):
    run = await ended_run(bus, blobs)
    await bus.anchors.anchor()
    real = BrokerLogbook.length

    async def after_the_purge(book, model_id):
        monkeypatch.undo()
        await pruner.go_round()
        return await real(book, model_id)

    monkeypatch.setattr(BrokerLogbook, "length", after_the_purge)
    assert await verified(config) == 0
    assert f"{run}: pruned: " in capsys.readouterr().out


async def test_samples_that_go_while_their_run_is_exported_are_missed(
    bus, blobs, config, pruner, monkeypatch, tmp_path
):
    await ended_run(bus, blobs)
    run = (await bus.log.models())[0]
    real = BrokerLogbook.pruned

    async def exported(has_samples):
        file = tmp_path / "run.tslog"
        await log_commands.export(
            config, run, file, overwrite=False, has_samples=has_samples, has_key=True
        )

    async def after_the_purge(book):
        await pruner.go_round()
        return await real(book)

    async def not_yet(_):
        monkeypatch.setattr(BrokerLogbook, "pruned", after_the_purge)
        return {}

    monkeypatch.setattr(BrokerLogbook, "pruned", not_yet)
    with pytest.raises(Gone, match="was pruned while it was exported"):
        await exported(has_samples=True)
    assert not list(tmp_path.glob("*.tslog"))


async def test_anchors_that_say_pruned_excuse_nothing_of_a_log_that_is_there(
    bus, blobs, config, capsys
):
    run = await ended_run(bus, blobs)
    await bus.anchors.anchor()
    await bus.anchors.note([await bus.pruning.mark(run, reason="a policy", by="somebody")])
    assert await verified(config, run) == log_commands.OK
    said = capsys.readouterr().out
    assert f"{run}: verified" in said
    assert "its pruning was begun" in said

    forged = table.LOG_TEMPLATE.subject(model=ids.token(run), kind="op", number="9000")
    await bus._connection[1].publish(forged, b"forged")
    assert await verified(config, run) == log_commands.FOUND
