"""Renders the list of metrics as ``docs/metrics.md``.

python -m tinsmith.metrics.describe > docs/metrics.md
"""

from __future__ import annotations

import sys
from itertools import groupby

from tinsmith.metrics import names

_HEADER = """\
# Metrics

Generated from `tinsmith.metrics.names` by `python -m tinsmith.metrics.describe`; a test compares.

Each process answers `/metrics` on a listener of its own; [Running](running.md) says where. Every
line has the labels `service` and `base_model` of its process besides those below. No label holds
an id of a request, model, session or owner. Durations are in seconds, sizes in bytes; the usual
`process_*` metrics come with them. Counters begin anew with each process.

`deploy/prometheus/` has a configuration and rules for alerts, `deploy/grafana/` a dashboard. The
broker's own metrics come from
[its exporter](https://github.com/nats-io/prometheus-nats-exporter), those of another engine from
that engine.
"""


def page() -> str:
    """The whole page, Markdown."""
    parts = [_HEADER]
    ordered = sorted(names.ALL.values(), key=lambda one: _ORDER.index(one.services))
    for services, declared in groupby(ordered, key=lambda one: one.services):
        parts += [
            f"## {_title(services)}\n",
            "| name | type | labels | what |",
            "|---|---|---|---|",
        ]
        for one in declared:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            parts.append(f"| `{one.name}` | {one.kind} | {labels} | {one.help} |")
        parts.append("")
    return "\n".join(parts)


_ORDER = list(dict.fromkeys(one.services for one in names.ALL.values()))


def _title(services: tuple[str, ...]) -> str:
    names_of = " and ".join(f"{one}s" for one in services)
    return "Every service" if len(services) == 4 else names_of.capitalize()


if __name__ == "__main__":
    sys.stdout.write(page())
