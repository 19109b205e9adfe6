"""``python -m tinsmith.cookbook RECIPE [key=value ...]``, in the cookbook's own environment."""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys

from tinsmith.cookbook import TOKENIZERS, recipes
from tinsmith.errors import StartupError

_EXIT_USAGE = 2


def main(arguments: list[str]) -> None:
    """Prepare the cookbook, then run the recipe as ``python -m`` would."""
    if not arguments:
        raise StartupError("no recipe named; for example: math_rl env=arithmetic")
    module = recipes.module(arguments[0])
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    # Only now, since they import the cookbook and all that it brings.
    from tinsmith.cookbook import hub, models

    hub.prepare()
    models.register(json.loads(os.environ.get(TOKENIZERS, "{}")))
    sys.argv = [module, *arguments[1:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except StartupError as error:
        sys.stderr.write(f"tinsmith cookbook: {error}\n")
        sys.exit(_EXIT_USAGE)
