"""``tinsmith demo``: server, training, test, and what to do next."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tinsmith import paths
from tinsmith.demo import model, packages, server
from tinsmith.demo.progress import step
from tinsmith.errors import ServerError, StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.demo.results import Results
    from tinsmith.demo.server import Address

EXIT_OK, EXIT_NOT_LEARNED, EXIT_INTERRUPTED = 0, 1, 130
BASE_URL_VARIABLE = "TINKER_BASE_URL"
DEFAULT_URL = "http://127.0.0.1:8400"


def main(
    *,
    data_dir: Path | None = None,
    keep: bool = False,
    steps: int | None = None,
    json_path: Path | None = None,
) -> int:
    """Run the demo; 0 when the model has learned the style, 1 when not, 130 after Ctrl-C.

    Args:
        data_dir: folder of the demo's server; ``demo`` in the default data folder when None.
        keep: leave the server running at the end, until Ctrl-C.
        steps: train only so many steps (for a quick look: the result is then 1 as a rule).
        json_path: where to write the results as JSON.

    With TINKER_BASE_URL in the environment that server is used, and none is started.

    Raises:
        StartupError: model, package or server are not to be had; one line says why.
        ServerError: the server ended before its time.
    """
    console = Console()
    packages.require("tinker", "transformers")
    if json_path is not None:
        _require_writable(json_path)
    try:
        with _address(data_dir, console) as address:
            results = _learn(address, console, steps)
            _conclude(results, console, json_path)
            if address is not None:
                _show_next_steps(address, console, keep=keep)
                if keep:
                    threading.Event().wait()
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return EXIT_INTERRUPTED
    return EXIT_OK if results.has_learned else EXIT_NOT_LEARNED


def _require_writable(path: Path) -> None:
    """Better now than after the training."""
    try:
        path.touch()
    except OSError as error:
        raise StartupError(
            f"--json: {path} cannot be written: {error.strerror}; choose another file"
        ) from error


@contextlib.contextmanager
def _address(data_dir: Path | None, console: Console) -> Iterator[Address | None]:
    """A server of our own, or None for the one that the environment names."""
    if os.environ.get(BASE_URL_VARIABLE):
        yield None
        return
    root = (data_dir or paths.default_data_dir() / "demo").absolute()
    paths.DataDir(root).prepare()
    config = server.write_config(root, model.fetch(paths.cache_dir().absolute(), console=console))
    _stay_on_this_machine()
    with contextlib.ExitStack() as stack:
        with step(console, f"Starting the server in {root}"):
            address = stack.enter_context(server.running(config))
        yield address


def _stay_on_this_machine() -> None:
    """Everything is here from now on: nothing shall wait for a hub or ask a proxy."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]


def _learn(address: Address | None, console: Console, steps: int | None) -> Results:
    import tinker

    from tinsmith.demo import experiment

    key = address.api_key_file.read_text().strip() if address else None
    service = tinker.ServiceClient(
        base_url=address.base_url if address else None, api_key=key, display_name="tinsmith demo"
    )
    try:
        results = experiment.conduct(service, console, steps)
        service.close("success").result()
    except tinker.TinkerError as error:
        raise ServerError(f"the server refused or failed: {error}") from error
    return results


def _conclude(results: Results, console: Console, json_path: Path | None) -> None:
    from tinsmith.demo.results import LEAST_AFTER, MOST_BEFORE, side_by_side, write

    before, after = results.pass_rates
    console.print()
    console.print(side_by_side(results))
    console.print(
        f"\nAnswers in telegram style: {before:.0%} before, {after:.0%} after "
        f"{len(results.steps)} steps at {results.tokens_per_s:.0f} tokens/s.\n"
        f"Checkpoint: {results.checkpoint}",
        highlight=False,
        soft_wrap=True,
    )
    if not results.has_learned:
        console.print(
            f"That is not enough: at most {MOST_BEFORE:.0%} before and at least "
            f"{LEAST_AFTER:.0%} after are expected.",
            highlight=False,
        )
    if json_path is not None:
        write(results, json_path)


def _show_next_steps(address: Address, console: Console, *, keep: bool) -> None:
    key_file = shlex.quote(str(address.api_key_file))
    if keep:
        intro = "The server keeps running; Ctrl-C stops it."
        url = address.base_url
    else:
        intro = f"To start this server again, with the checkpoint:\n\n  {_up(address)}"
        url = DEFAULT_URL
    console.print(
        f"\n{intro}\n\nIn the shell of your own script:\n\n"
        f"  export TINKER_BASE_URL={url}\n"
        f'  export TINKER_API_KEY="$(cat {key_file})"\n'
        "  python your_loop.py\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _up(address: Address) -> str:
    beside_python = Path(sys.executable).with_name("tinsmith")
    if shutil.which("tinsmith"):
        command = ["tinsmith"]
    elif beside_python.exists():  # an environment that is not activated
        command = [str(beside_python)]
    else:
        command = [sys.executable, "-m", "tinsmith"]
    return shlex.join([*command, "up", "--config", str(address.config)])
