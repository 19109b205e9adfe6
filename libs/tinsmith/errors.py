"""Every exception Tinsmith raises on purpose; the category says who must act.

TinsmithError
├── UserError               the caller must change the request
│   ├── InvalidRequest      a field is wrong (HTTP 400 / failed future)
│   │   └── UnusableGradient    a step's gradient is not finite; it was dropped
│   ├── Unauthorized        the key is missing, wrong or expired (401)
│   ├── NotFound            no such thing, or not yours (404)
│   ├── Gone                it existed and has ended (410)
│   │   └── Forgotten       the key of its contents was destroyed
│   ├── TooLarge            a body or a batch is over a limit (413)
│   │   └── NoRoom              it takes more memory than this machine has
│   └── NotSupported        a part of the protocol this server lacks (400)
├── Busy                    a queue is full; the same request may be sent again (429)
│   └── VersionUnmet            no weights of the version that was asked for are served here yet
├── ServerError             the operator must act
│   ├── BrokerUnavailable   NATS cannot be reached
│   ├── NoResponder         no service of that kind is running
│   ├── Fenced              another owner has taken the model over
│   ├── BlobMissing         bytes that a message refers to are not in the store
│   ├── SealBroken          sealed bytes cannot be opened here
│   └── StorageFull         the blob store or the broker's disk is full
└── StartupError            a service cannot start; one line, exit code 2
    └── ConfigError         a configuration key or value is wrong

Messages name the field, the value, the limit and the remedy.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Category = Literal["user", "server", "unknown"]


class TinsmithError(Exception):
    """Root of all errors raised on purpose."""

    category: ClassVar[Category] = "unknown"


class UserError(TinsmithError):
    """The caller must change the request."""

    category = "user"


class InvalidRequest(UserError):
    """A field of the request is wrong."""


class UnusableGradient(InvalidRequest):
    """The accumulated gradient is not finite: no step was made, and the gradient is dropped."""


class Unauthorized(UserError):
    """The API key is missing, wrong or expired."""


class NotFound(UserError):
    """No such object, or it belongs to someone else."""


class Gone(UserError):
    """The object existed and has ended or expired."""


class Forgotten(Gone):
    """The key of a run's contents was destroyed: nobody can read them any more."""


class TooLarge(UserError):
    """A body or batch is over a limit."""


class NoRoom(TooLarge):
    """It takes more memory than this machine has; another may have it."""


class NotSupported(UserError):
    """A part of the protocol that this server does not have."""


class Busy(TinsmithError):
    """A queue is full; the same request may be sent again later."""

    category = "server"


class VersionUnmet(Busy):
    """The weights served here are not of the version asked for; send it again, or elsewhere."""


class ServerError(TinsmithError):
    """The operator must act."""

    category = "server"


class BrokerUnavailable(ServerError):
    """NATS cannot be reached."""


class NoResponder(ServerError):
    """No service answers on the subject."""


class Fenced(ServerError):
    """Another owner has taken this model over; local state is void."""


class BlobMissing(ServerError):
    """Bytes that a message refers to are not in the blob store."""


class SealBroken(ServerError):
    """Sealed bytes cannot be opened: the key is not here, or they are not what was sealed."""


class StorageFull(ServerError):
    """The blob store or the broker's disk is full."""


class StartupError(TinsmithError):
    """A service cannot start; the message is the one line that the operator sees."""

    category = "server"


class ConfigError(StartupError):
    """A configuration key or value is wrong."""
