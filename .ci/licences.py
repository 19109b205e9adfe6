"""The licences of everything that an installation runs with, as ``docs/licences.md``.

python .ci/licences.py > docs/licences.md

Tools that only developers use are left out: nothing of them is shipped or linked to.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("broker", "gateway", "trainer", "sampler", "checkpointer", "quantised", "tracing")
# Permissive ones, and those that ask for changes to their own files alone.
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MPL-2.0",
    "PSF-2.0", "Python-2.0", "Unlicense", "Zlib", "Apache-2.0 WITH LLVM-exception", "BSL-1.0",
    "CNRI-Python", "MIT-0",
}  # fmt: skip
# What packages write that do not name an identifier of SPDX; of the whole field.
SPELLINGS = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "3-clause bsd license": "BSD-3-Clause",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "mit license": "MIT",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
# These tell nothing in their metadata; their repositories do.
TOLD_ELSEWHERE = {"pyrage": "MIT"}

_HEADER = """\
# Licences

Of the packages that an installation runs with, in the versions of `constraints.txt`. Made by
`python .ci/licences.py`; a test compares, and fails on a licence that is unknown or asks for more
than attribution and the source of changes to the package itself.

With GPUs, torch brings NVIDIA's CUDA libraries, under NVIDIA's own terms. `nats-server` is
Apache-2.0, and so is Tinsmith. The dashboard's uPlot is MIT. Models have licences of their own.
"""


def packages() -> list[importlib.metadata.Distribution]:
    """Everything that is required, directly or not, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = [one for text in _own() for one in _asked_for(text, "")]
    seen: set[tuple[str, str]] = set()
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        found[name] = distribution
        for text in distribution.requires or ():
            wanted += _asked_for(text, extra)
    return [found[name] for name in sorted(found)]


def _own() -> list[str]:
    """Requirements of the project itself, from its file: what is installed may be older."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]


def _asked_for(text: str, extra: str) -> list[tuple[str, str]]:
    """Packages and extras of them that a requirement means here."""
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        return []
    name = canonicalize_name(requirement.name)
    return [(name, one) for one in ("", *sorted(requirement.extras))]


def licence_of(distribution: importlib.metadata.Distribution) -> str:
    """As an SPDX expression; what is written, if that is none; empty when nothing is."""
    told = distribution.metadata
    classified = [
        value.rpartition(" :: ")[2]
        for value in told.get_all("Classifier") or []
        if value.startswith("License :: ") and not value.endswith("DFSG approved")
    ]
    written = told.get("License-Expression") or told.get("License") or ""
    if "\n" in written or not written:
        written = " OR ".join(SPELLINGS.get(one.lower(), one) for one in classified)
    name = canonicalize_name(told["Name"])
    return SPELLINGS.get(written.lower(), written) or TOLD_ELSEWHERE.get(name, "")


def is_allowed(expression: str) -> bool:
    """Whether each part of all of them, and one of each choice, is allowed."""
    if not expression:
        return False
    plain = re.sub(r"[()]", "", expression)
    return all(
        any(choice.strip() in ALLOWED for choice in part.split(" OR "))
        for part in plain.split(" AND ")
    )


def page() -> str:
    """The whole page, Markdown."""
    rows = [f"| {one.metadata['Name']} | {licence_of(one) or 'unknown'} |" for one in packages()]
    return "\n".join([_HEADER, "| package | licence |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(page())
