"""Which module a recipe's name means."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tinsmith.errors import StartupError


def module(name: str) -> str:
    """``math_rl`` is ``tinker_cookbook.recipes.math_rl.train``; ``rl_loop`` stands for itself.

    Looks at files and imports nothing, since recipes bind names of others when imported.

    Raises:
        StartupError: the cookbook or the recipe is not there.
    """
    recipes = _folder() / "recipes"
    parts = name.split(".")
    if all(map(str.isidentifier, parts)):
        for path in ([*parts, "train"], parts):
            if recipes.joinpath(*path).with_suffix(".py").is_file():
                return ".".join(("tinker_cookbook", "recipes", *path))
    raise StartupError(
        f"recipe {name!r}: there is none in {recipes}; name a module there, as in rl_loop or "
        f"preference.dpo; at the top it has {', '.join(_known(recipes))}"
    )


def _folder() -> Path:
    spec = importlib.util.find_spec("tinker_cookbook")
    if spec is None or not spec.submodule_search_locations:
        raise StartupError(
            "the package tinker-cookbook is not installed here; run 'make cookbook', or use the "
            "environment that has it"
        )
    return Path(spec.submodule_search_locations[0])


def _known(recipes: Path) -> list[str]:
    folders = (path.name for path in recipes.iterdir() if path.is_dir())
    return sorted(
        [path.stem for path in recipes.glob("*.py")]
        + [name for name in folders if name.isidentifier() and name != "__pycache__"]
    )
