"""When payloads of a run have to be forgotten."""

from __future__ import annotations

import pytest

from tinsmith import config
from tinsmith.errors import ConfigError
from tinsmith.messages.ops import LoraShape
from tinsmith.messages.registry import Run, Session
from tinsmith_checkpointer.retention import RetentionConfig, seconds, why_due, why_prunable

DAY_NS = 86400 * 10**9
MONTH = RetentionConfig(payloads="30d")


def run(**fields):
    return Run(
        model_id="m", session_id="s", owner="alice", created_ns=0, base_model="b",
        lora=LoraShape(), **fields,
    )  # fmt: skip


def ended(day, **fields):
    return Session(
        session_id="s", owner="alice", created_ns=0, status="finished", ended_ns=day * DAY_NS,
        **fields,
    )  # fmt: skip


RUN, ENDED = run(), ended(0)
LIVE = Session(session_id="s", owner="alice", created_ns=0)


def is_due(settings, day, *, run=RUN, session=ENDED):
    return why_due(settings, run, session, now_ns=int(day * DAY_NS)) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("12h", 43200),
        ("30d", 2592000),
        ("8w", 4838400),
        ("forever", None),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["30", "d30", "30 d", "1.5d", "0d", "30D", "-1d", "", "30days"])
def test_a_misspelt_duration_is_a_config_error(tmp_path, text):
    path = tmp_path / "tinsmith.toml"
    path.write_text(f'[retention]\npayloads = "{text}"\n')

    with pytest.raises(ConfigError, match=r"retention\.payloads"):
        config.load(path, {})


def test_a_misspelt_duration_of_an_owner_is_a_config_error(tmp_path):
    path = tmp_path / "tinsmith.toml"
    path.write_text('[retention.owners]\nalice = "30days"\n')

    with pytest.raises(ConfigError, match=r"retention\.owners.*30days"):
        config.load(path, {})


def test_the_settings_are_read_from_a_file(tmp_path):
    path = tmp_path / "tinsmith.toml"
    path.write_text('[retention]\npayloads = "30d"\n[retention.projects]\npii = "12h"\n')

    assert config.load(path, {}).section(RetentionConfig) == RetentionConfig(
        payloads="30d", projects={"pii": "12h"}
    )


def test_without_a_setting_nothing_is_ever_due():
    assert not RetentionConfig().is_needed
    assert not is_due(RetentionConfig(), 10_000)


def test_a_run_is_due_when_its_session_ended_long_enough_ago():
    assert not is_due(MONTH, 29.99)
    assert is_due(MONTH, 30)
    assert not is_due(MONTH, 30, session=ended(1))


def test_a_live_run_is_never_due():
    assert not is_due(MONTH, 10_000, session=LIVE)


@pytest.mark.parametrize(
    "session", [None, Session(session_id="s", owner="a", created_ns=0, status="expired")]
)
def test_an_end_that_is_not_known_counts_from_the_beginning_of_the_run(session):
    assert is_due(MONTH, 30, session=session)
    assert not is_due(MONTH, 29, session=session)


def test_a_project_goes_before_its_owner_and_both_before_the_rest():
    settings = RetentionConfig(
        payloads="30d", owners={"alice": "10d"}, projects={"pii": "1d", "public": "forever"}
    )

    assert settings.is_needed
    assert is_due(settings, 10)
    assert not is_due(settings, 9)
    assert is_due(settings, 1, run=run(project_id="pii"))
    assert is_due(settings, 1, session=ended(0, project_id="pii"))
    assert not is_due(settings, 10_000, run=run(project_id="public"))


def is_prunable(settings, day, *, run=RUN, session=ENDED):
    return why_prunable(settings, run, session, now_ns=int(day * DAY_NS)) is not None


def test_logs_are_kept_by_settings_of_their_own():
    settings = RetentionConfig(
        payloads="1d", logs="30d", log_owners={"alice": "10d"}, log_projects={"pii": "1d"}
    )

    assert settings.prunes
    assert not is_prunable(MONTH, 10_000)
    assert is_prunable(settings, 10)
    assert not is_prunable(settings, 9)
    assert is_prunable(settings, 1, run=run(project_id="pii"))
    assert not is_prunable(settings, 10_000, session=LIVE)


def test_logs_are_kept_for_ever_unless_it_is_said_otherwise():
    assert not MONTH.prunes
    assert RetentionConfig(log_projects={"pii": "1d"}).prunes
    assert not RetentionConfig(logs="1d").is_needed


def test_a_pruned_log_says_by_which_policy():
    settings = RetentionConfig(logs="30d")
    reason = why_prunable(settings, RUN, ENDED, now_ns=30 * DAY_NS)

    assert reason == "retention of logs: 30d after its session ended"
