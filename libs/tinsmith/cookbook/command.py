"""``tinsmith cookbook``: from this installation to the environment that has the cookbook."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tinsmith.cli.reach import unreachable
from tinsmith.config import load
from tinsmith.cookbook import TOKENIZERS
from tinsmith.errors import StartupError
from tinsmith.paths import DataDir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinsmith.config import Config

PYTHON = "TINSMITH_COOKBOOK_PYTHON"
ENVIRONMENT = ".venv-cookbook"
BASE_URL, API_KEY = "TINKER_BASE_URL", "TINKER_API_KEY"
OFFLINE, ENDPOINT = "HF_HUB_OFFLINE", "HF_ENDPOINT"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_HUB = "https://huggingface.co"


def run(
    recipe: str, arguments: Sequence[str], *, config: Path | None, data_dir: Path | None
) -> NoReturn:
    """Become the recipe's process.

    Raises:
        StartupError: no environment with the cookbook, or no server.
    """
    environ = dict(os.environ)
    if data_dir is not None:
        environ["TINSMITH_DATA_DIR"] = str(data_dir.absolute())
    loaded = load(config, environ)
    python = interpreter(environ)
    environ |= server(loaded, environ)
    require_answer(environ)
    environ[TOKENIZERS] = json.dumps({model.name: model.tokenizer for model in loaded.models})
    if hub := _unreachable_hub(environ):
        sys.stderr.write(f"tinsmith cookbook: {hub}; only what is on this machine is used\n")
        environ[OFFLINE] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(python, [python, "-m", "tinsmith.cookbook", recipe, *arguments], environ)


def interpreter(environ: Mapping[str, str], prefix: str = sys.prefix) -> str:
    """The Python that has the cookbook: named, beside this environment, or this one."""
    if named := environ.get(PYTHON):
        if not os.access(named, os.X_OK):
            raise StartupError(f"{PYTHON}: {named} is no program; name a Python interpreter")
        return named
    made = Path(prefix).with_name(ENVIRONMENT) / "bin" / "python"
    if made.exists():
        return str(made)
    if find_spec("tinker_cookbook") is not None:
        return sys.executable
    raise StartupError(
        f"no environment with tinker-cookbook: {made} does not exist; run 'make cookbook', or set "
        f"{PYTHON} to the Python of one where tinker-cookbook and tinsmith are installed"
    )


def server(loaded: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Address and key for the client: as it is told already, else those of the server here."""
    if environ.get(BASE_URL):
        return {}
    up_file = DataDir(loaded.data_dir).up_file
    try:
        told = json.loads(up_file.read_text())
    except FileNotFoundError:
        raise StartupError(
            f"no server: {BASE_URL} is not set, and no 'tinsmith up' uses {loaded.data_dir}; start "
            "one, or say which with --config or --data-dir"
        ) from None
    found = {BASE_URL: told["base_url"]}
    if not environ.get(API_KEY):
        found[API_KEY] = _key(told)
    return found


def require_answer(environ: Mapping[str, str]) -> None:
    """StartupError when nothing answers at the address: the client would try for minutes."""
    address = environ[BASE_URL]
    if _has_proxy(environ):
        return  # only a whole request could tell
    default_port = 443 if address.startswith("https:") else 80
    if reason := unreachable(address, default_port=default_port):
        raise StartupError(
            f"{BASE_URL} {address}: {reason}; start a server with 'tinsmith up', or name another"
        )


def _has_proxy(environ: Mapping[str, str]) -> bool:
    return any(name.lower() in _PROXIES and value for name, value in environ.items())


def _key(told: Mapping[str, str]) -> str:
    file = told.get("api_key_file")
    if not file:
        raise StartupError(f"{API_KEY} is not set; this server's keys stand in its configuration")
    return Path(file).read_text().strip()


def _unreachable_hub(environ: Mapping[str, str]) -> str:
    """Why the hub cannot be used; empty when it can, or when the environment decides that.

    Asked once here, because a client of the hub tries for minutes.
    """
    if environ.get(OFFLINE) or _has_proxy(environ):
        return ""
    return unreachable(environ.get(ENDPOINT) or _HUB, default_port=443)
