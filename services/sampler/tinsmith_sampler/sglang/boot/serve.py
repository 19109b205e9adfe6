"""Starts an SGLang server: the file that its interpreter is given, with the server's arguments.

A file and not a module: SGLang's processes are spawned, and a spawned process runs the main file
again, as far as it is not behind the last lines. So the patches reach each of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = "tinsmith_sglang_boot"


def _load_package() -> None:
    """This folder as a package, without the one around it, which needs our environment."""
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        msg = f"{folder} is incomplete; install Tinsmith again"
        raise ImportError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


def _serve(arguments: list[str]) -> None:
    """As SGLang's own launcher does, until the server ends."""
    importlib.import_module("sglang.srt.plugins").load_plugins()
    launch_server = importlib.import_module("sglang.launch_server")
    server_args = importlib.import_module("sglang.srt.server_args")
    utils = importlib.import_module("sglang.srt.utils")
    try:
        launch_server.run_server(server_args.prepare_server_args(arguments))
    finally:
        utils.kill_process_tree(os.getpid(), include_parent=False)


_load_package()
importlib.import_module(f"{PACKAGE}.patches").apply()

if __name__ == "__main__":
    # Not on the command line, which every user of the machine can read; gone for its children.
    _key = os.environ.pop("TINSMITH_SGLANG_KEY", "")
    _serve([*sys.argv[1:], *(["--api-key", _key] if _key else [])])
