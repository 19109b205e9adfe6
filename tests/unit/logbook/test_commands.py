"""`tinsmith log` on files, as a user calls it: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.unit.logbook.made import MODEL, OTHER, STEPPED, Made, a_run, packed, parts_of_file

from tinsmith.logbook import Entry
from tinsmith.logbook.container import Kind
from tinsmith.messages import ops

COMMANDS = ("ls", "show", "verify", "export", "import", "diff")
HEAVY = ("torch", "nats", "numpy", "obstore", "rich", "structlog")


def log(*args, folder, **environ):
    command = [sys.executable, "-P", "-m", "tinsmith", "log", *map(str, args)]
    environ |= {"TINSMITH_DATA_DIR": str(folder / "data"), "HOME": str(folder)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environ, check=False, cwd=folder
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.tslog"
    path.write_bytes(packed(parts_of_file(a_run())))
    return path


@pytest.fixture
def damaged(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_its_exit_codes(command, tmp_path):
    shown = log(command, "--help", folder=tmp_path)

    assert shown.returncode == 0
    for text in (f"Usage: tinsmith log {command}", "Exit codes:\n", "tinsmith log"):
        assert text in shown.stdout


def test_help_imports_nothing_heavy():
    code = f"import sys, tinsmith.cli.log; print([m for m in {HEAVY} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.strip() == "[]"


def test_a_good_file_is_verified(file, tmp_path):
    shown = log("verify", file, folder=tmp_path)

    assert (shown.returncode, shown.stderr) == (0, "")
    first, head, state = shown.stdout.splitlines()
    assert first.startswith(f"{MODEL}: verified, 14 entries, 10 ops by 2 owners, 5 blobs of 3.")
    assert (head, state) == (f"  last entry {a_run().head}", "  last state s7")


def test_a_damaged_file_is_exit_code_1_and_one_line(damaged, tmp_path):
    shown = log("verify", damaged, folder=tmp_path)

    assert (shown.returncode, shown.stderr) == (1, "")
    assert shown.stdout.startswith(f"{MODEL}: damaged: ")
    assert shown.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("digest", "code"), [(a_run().head[:16], 0), ("0" * 16, 1), ("0" * 15, 2), ("xyz", 2)]
)
def test_a_digest_that_was_kept_shows_a_cut_tail(file, tmp_path, digest, code):
    assert log("verify", file, "--head", digest, folder=tmp_path).returncode == code


@pytest.mark.parametrize(
    "args", [("verify",), ("verify", "x", "--all"), ("verify", "--all", "--head", "0" * 16)]
)
def test_contradictory_options_are_exit_code_2_and_one_line(args, tmp_path):
    shown = log(*args, folder=tmp_path)

    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith("tinsmith log verify: error: verify: give a run or a file")
    assert shown.stderr.count("\n") == 1


def test_a_file_that_is_not_there_is_exit_code_2(tmp_path):
    shown = log("verify", "none.tslog", folder=tmp_path)

    assert shown.returncode == 2
    assert shown.stderr == "tinsmith log verify: error: none.tslog: there is no such file\n"


def test_what_a_file_says_cannot_steer_the_terminal(tmp_path):
    parts = parts_of_file(a_run())
    forged = parts[2][1].replace(read(parts[2][1]).prev_blake3.encode(), b"\x1b[2J" * 16)
    (tmp_path / "x.tslog").write_bytes(packed([*parts[:2], (Kind.ENTRY, forged), *parts[3:]]))
    for command in (("verify", "x.tslog"), ("export", "x.tslog", "y.tslog")):
        shown = log(*command, folder=tmp_path)

        assert shown.returncode == 1
        assert "prev_blake3: \\u001b[2J" in shown.stdout + shown.stderr
        assert "\x1b" not in shown.stdout + shown.stderr


def read(data):
    return Entry.read(data, "").entry


def test_what_is_no_log_is_exit_code_1(tmp_path):
    (tmp_path / "x.tslog").write_text("not a log at all, but longer than the header of a part" * 9)
    shown = log("verify", tmp_path / "x.tslog", folder=tmp_path)

    assert shown.returncode == 1
    assert shown.stderr == (
        "tinsmith log verify: error: the cover: cover: there is no header of a part at byte 0\n"
    )


def test_a_run_is_asked_of_the_broker_and_its_absence_is_exit_code_2(tmp_path):
    shown = log("verify", "abc", folder=tmp_path, TINSMITH_NATS_URL="nats://127.0.0.1:1")

    assert shown.returncode == 2
    assert "no NATS server answers at nats://127.0.0.1:1" in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_show_prints_a_table_or_json_lines(file, tmp_path):
    table = log("show", file, folder=tmp_path).stdout.splitlines()
    told = [
        json.loads(line)
        for line in log("show", file, "--json", folder=tmp_path).stdout.splitlines()
    ]

    assert len(table) == 1 + len(told) == 15
    assert told[3]["kind"] == "optim_step"
    assert told[3]["op_blake3"][:8] in table[4]


def test_show_stops_at_the_damage(damaged, tmp_path):
    shown = log("show", damaged, folder=tmp_path)

    assert shown.returncode == 1
    assert 2 <= shown.stdout.count("\n") < 15
    assert shown.stderr.startswith("tinsmith log show: error: ")


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path):
    made = Made().own()
    for number in range(3000):
        made.op(ops.OptimStep(), STEPPED, state=f"s{number}")
    (tmp_path / "long.tslog").write_bytes(packed(parts_of_file(made)))
    pipe = f"{sys.executable} -m tinsmith log show long.tslog | head -2; exit ${{PIPESTATUS[0]}}"
    shown = subprocess.run(
        ["bash", "-c", pipe], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.count("\n") == 2


def test_ls_of_a_file_is_one_row(file, tmp_path):
    title, row = log("ls", file, folder=tmp_path).stdout.splitlines()

    assert title.split() == ["run", "base", "model", "last", "op", "owners", "last", "entry"]
    assert row.split() == [MODEL, "9", "2", a_run().head[:8]]


def test_a_file_is_exported_again_byte_for_byte(file, tmp_path):
    shown = log("export", file, tmp_path / "again.tslog", folder=tmp_path)
    again = log("export", tmp_path / "again.tslog", tmp_path / "third.tslog", folder=tmp_path)

    assert (shown.returncode, again.returncode) == (0, 0)
    assert (tmp_path / "again.tslog").read_bytes() == (tmp_path / "third.tslog").read_bytes()


def test_an_export_asks_before_it_overwrites(file, tmp_path):
    refused = log("export", file, file, folder=tmp_path)
    forced = log("export", file, file, "--force", folder=tmp_path)

    assert (refused.returncode, forced.returncode) == (2, 0)
    assert "--force" in refused.stderr
    assert log("verify", file, folder=tmp_path).returncode == 0


def test_diff_of_equal_runs_is_exit_code_0(file, tmp_path):
    (tmp_path / "other.tslog").write_bytes(packed(parts_of_file(a_run(OTHER))))
    shown = log("diff", file, tmp_path / "other.tslog", folder=tmp_path)

    assert (shown.returncode, shown.stdout) == (0, "equal: 10 ops\n")


def test_diff_names_the_first_difference_with_exit_code_1(file, tmp_path):
    made = a_run(OTHER).op(ops.OptimStep(), STEPPED, state="s10")
    (tmp_path / "other.tslog").write_bytes(packed(parts_of_file(made)))
    shown = log("diff", file, tmp_path / "other.tslog", folder=tmp_path)

    assert shown.returncode == 1
    assert shown.stdout == (
        "10 ops are equal; op 10 differs:\n  op: its log has ended in A, it is there in B\n"
    )
