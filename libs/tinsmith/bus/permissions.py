"""The roles of the services as users of nats-server, each with the least that its work needs.

python -m tinsmith.bus.permissions > deploy/nats/users.conf

What a rule cannot say: whoever may ask JetStream for something names where the answer goes, and
the broker sends it there with its own permissions. See docs/security.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.bus.roles import EVERYBODY, ROLES
from tinsmith.bus.rpc import INBOXES, QUEUE_GROUP
from tinsmith.messages.table import PREFIX, REGISTRY_STREAM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.bus.roles import Role

API = "$JS.API"
OPERATOR = "operator"

_HEADER = """\
# The broker's users: one for each service, with the least that its work needs, and the operator.
# Made from the table of messages by `python -m tinsmith.bus.permissions`; a test compares.
#
# Passwords come from the environment of nats-server. Let each begin with a letter: nats-server
# reads what looks like a number as one.
"""


class Rules(NamedTuple):
    """Subjects that a user may publish to and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    may_answer: bool = False


def rules(service: str) -> Rules:
    """Those of one service."""
    role = ROLES[service]
    said = (*_said(EVERYBODY), *_said(role))
    heard = (f"{inbox_prefix(service)}.>", *_heard(role))
    return Rules(tuple(sorted(set(said))), tuple(sorted(set(heard))), bool(role.serves))


def operator() -> Rules:
    """Of who prepares the broker, makes keys and audits logs; nothing of other users' inboxes."""
    return Rules((f"{API}.>", f"{PREFIX}.>"), (f"{inbox_prefix(OPERATOR)}.>", f"{PREFIX}.>"))


def inbox_prefix(user: str) -> str:
    """What a user's ``bus.inbox_prefix`` has to be."""
    return f"{INBOXES}_{user}"


def _said(role: Role) -> Iterator[str]:
    yield f"{API}.STREAM.NAMES"
    for row in (*role.calls, *role.emits, *role.enqueues, *role.sets):
        yield row.wildcard
    for _, template in role.appends:
        yield template.wildcard
    yield from _queued(role)
    for stream, template in role.reads:
        yield f"{API}.DIRECT.GET.{stream}"
        yield from _reading(stream, template.wildcard)
    for stream, _ in role.forgets:
        yield f"{API}.STREAM.PURGE.{stream}"
    for entity in role.sees:
        yield from _reading(REGISTRY_STREAM, entity.wildcard)
    if role.erases:
        yield f"{API}.STREAM.MSG.DELETE.{REGISTRY_STREAM}"


def _queued(role: Role) -> Iterator[str]:
    for queue in role.works:
        yield f"{API}.CONSUMER.DURABLE.CREATE.{queue.stream}.*"
        yield f"{API}.CONSUMER.MSG.NEXT.{queue.stream}.*"
        yield f"{API}.DIRECT.GET.{queue.stream}"
        yield f"$JS.ACK.{queue.stream}.>"
    for queue in role.supersedes:
        yield f"{API}.CONSUMER.DELETE.{queue.stream}.*"
    for queue in role.looks:
        yield f"{API}.STREAM.INFO.{queue.stream}"
        yield f"{API}.DIRECT.GET.{queue.stream}"
        yield f"{API}.DIRECT.GET.{queue.stream}.{queue.wildcard}"
    for queue in role.withdraws:
        yield f"{API}.STREAM.PURGE.{queue.stream}"


def _reading(stream: str, wildcard: str) -> Iterator[str]:
    # The subject ends with what is read, so that a stream with many kinds of entries can be
    # opened for some of them.
    yield f"{API}.DIRECT.GET.{stream}.{wildcard}"
    yield f"{API}.CONSUMER.CREATE.{stream}.*.{wildcard}"
    yield f"{API}.CONSUMER.MSG.NEXT.{stream}.*"


def _heard(role: Role) -> Iterator[str]:
    for event in role.hears:
        yield event.wildcard
    for rpc in role.serves:
        yield f"{rpc.wildcard} {QUEUE_GROUP}"  # as one of those who answer, not as a listener


def page() -> str:
    """The configuration file."""
    parts = [_HEADER, "authorization {", "  timeout: 5", "  users = ["]
    for service in ROLES:
        parts += _user(service, rules(service))
    parts += _user(OPERATOR, operator())
    return "\n".join([*parts, "  ]", "}", ""])


def _user(name: str, granted: Rules) -> Iterator[str]:
    yield "    {"
    yield f'      user: "{name}", password: $NATS_{name.upper()}_PASSWORD'
    yield "      permissions: {"
    yield from _allowed("publish", granted.publish)
    yield from _allowed("subscribe", granted.subscribe)
    if granted.may_answer:
        yield '        allow_responses: { max: 1, expires: "5m" }'
    yield "      }"
    yield "    }"


def _allowed(what: str, subjects: tuple[str, ...]) -> Iterator[str]:
    yield f"        {what}: {{ allow: ["
    for subject in subjects:
        yield f'          "{subject}"'
    yield "        ] }"


if __name__ == "__main__":
    sys.stdout.write(page())
