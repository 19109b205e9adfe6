"""The roles of the services as users of nats-server, each with the least that its work needs.

python -m tinsmith.bus.permissions > deploy/nats/users.conf
python -m tinsmith.bus.permissions leaf > deploy/nats/leaf-users.conf

A leaf node is a nats-server of another region, without streams: who connects to it asks
JetStream as everybody does, the leaf passes it on under the name of our domain, and the first
region's servers let through what the user ``region`` may say.

What a rule cannot say: whoever may ask JetStream for something names where the answer goes, and
the broker sends it there with its own permissions. So the streams have an account to themselves:
what leaves it as an answer is not let in again, whatever its subject. See SECURITY.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.bus.roles import EVERYBODY, ROLES
from tinsmith.bus.rpc import INBOXES, QUEUE_GROUP
from tinsmith.bus.streams import configs
from tinsmith.config import BusConfig
from tinsmith.messages.table import PREFIX, QUEUES, REGISTRY_STREAM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.bus.roles import Role

API = "$JS.API"
DOMAIN_API = "$JS.tinsmith.API"
"""The same to a server of another region: ``jetstream.domain`` of the servers with streams."""
OPERATOR = "operator"
REGION = "region"
"""The user as which a leaf node connects."""
BEHIND_A_LEAF = ("gateway", "sampler")
"""Services that may connect to one; what others store had to wait for a round trip across."""
ASKED_ONCE = ("INFO", "STREAM.>", "DIRECT.>")
ASKED_OF_CONSUMERS = ("CREATE", "DURABLE", "DELETE", "INFO", "LIST", "NAMES")
ASKED_FOR_MANY = "CONSUMER.MSG.NEXT.>"
FORGOTTEN_AFTER = "10s"
"""Silence after which no more answers are let out to a pull. One has a heartbeat each second; those
without, of ``shared``, ask again after half of this."""

_HEADER = """\
# The broker's users: one for each service, with the least that its work needs, the operator, and
# the servers of other regions.
# Made from the table of messages by `python -m tinsmith.bus.permissions`; a test compares.
#
# Passwords come from the environment of nats-server. Let each begin with a letter: nats-server
# reads what looks like a number as one.
"""

_LEAF_HEADER = """\
# The users of a leaf node: the services of its region, with what they may do in users.conf.
# Made by `python -m tinsmith.bus.permissions leaf`; a test compares.
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


def region() -> Rules:
    """Of a leaf node: what the services behind it may do, and no more."""
    granted = [behind_a_leaf(service) for service in BEHIND_A_LEAF]
    asked = {rpc.wildcard for service in BEHIND_A_LEAF for rpc in ROLES[service].serves}
    said = {subject for one in granted for subject in one.publish}
    # What may be answered by whom was asked stays with the leaf: here it takes a rule.
    answered = {
        f"{inbox_prefix(name)}.>"
        for name, role in ROLES.items()
        if asked & {rpc.wildcard for rpc in role.calls}
    }
    heard = {subject.partition(" ")[0] for one in granted for subject in one.subscribe}
    told = {_listened_to(subject) for subject in said}
    return Rules(tuple(sorted(said | answered)), tuple(sorted(heard | told)))


def behind_a_leaf(service: str) -> Rules:
    """As ``rules``, at a leaf node, which looks at what it passes on."""
    granted = rules(service)
    said = (subject.replace(f"{API}.", f"{DOMAIN_API}.") for subject in granted.publish)
    return granted._replace(publish=tuple(sorted(said)))


def _listened_to(subject: str) -> str:
    # A leaf hears that somebody listens only where it may hear all that they do.
    for wide in (DOMAIN_API, f"{PREFIX}.reg"):
        if subject.startswith(f"{wide}."):
            return f"{wide}.>"
    return subject


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
    """users.conf: of the servers that have the streams."""
    users = {service: rules(service) for service in ROLES}
    users |= {OPERATOR: operator(), REGION: region()}
    parts = [_HEADER, "authorization { timeout: 5 }", "", "accounts {"]
    parts += ["  STREAMS: {", "    jetstream: enabled", "    exports: ["]
    for subject, many in _streams():
        several = f', response_type: stream, threshold: "{FORGOTTEN_AFTER}"' if many else ""
        parts.append(f'      {{ service: "{subject}"{several} }}')
    parts += ["    ]", "  }", "  SERVICES: {", "    imports: ["]
    for subject, _ in _streams():
        parts.append(f'      {{ service: {{ account: STREAMS, subject: "{subject}" }} }}')
    return "\n".join([*parts, "    ]", *_users(users, "    "), "  }", "}", ""])


def leaf_page() -> str:
    """leaf-users.conf."""
    users = {service: behind_a_leaf(service) for service in BEHIND_A_LEAF}
    parts = [_LEAF_HEADER, "authorization {", "  timeout: 5", *_users(users, "  "), "}", ""]
    return "\n".join(parts)


def _streams() -> Iterator[tuple[str, bool]]:
    """What is asked of the account with the streams, and whether many answers are wanted."""
    for verb in ASKED_ONCE:
        yield f"{API}.{verb}", False
    for verb in ASKED_OF_CONSUMERS:
        yield f"{API}.CONSUMER.{verb}.>", False
    yield f"{API}.{ASKED_FOR_MANY}", True
    for queue in QUEUES:
        yield f"$JS.ACK.{queue.stream}.>", False
    for config in configs(BusConfig()):
        for subject in config.subjects or ():
            yield subject, False


def _users(users: dict[str, Rules], indent: str) -> Iterator[str]:
    yield f"{indent}users: ["
    for name, granted in users.items():
        yield from (f"{indent}  {line}" for line in _user(name, granted))
    yield f"{indent}]"


def _user(name: str, granted: Rules) -> Iterator[str]:
    yield "{"
    yield f'  user: "{name}", password: $NATS_{name.upper()}_PASSWORD'
    if name == REGION:
        yield '  allowed_connection_types: ["LEAFNODE"]'
    yield "  permissions: {"
    yield from _allowed("publish", granted.publish)
    yield from _allowed("subscribe", granted.subscribe)
    if granted.may_answer:
        yield '    allow_responses: { max: 1, expires: "5m" }'
    yield "  }"
    yield "}"


def _allowed(what: str, subjects: tuple[str, ...]) -> Iterator[str]:
    yield f"    {what}: {{ allow: ["
    for subject in subjects:
        yield f'      "{subject}"'
    yield "    ] }"


if __name__ == "__main__":
    sys.stdout.write(leaf_page() if sys.argv[1:] == ["leaf"] else page())
