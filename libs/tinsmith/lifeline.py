"""What a process and its children agree on: exit codes, readiness, and dying together.

Dying together is Linux only (``PR_SET_PDEATHSIG``); elsewhere children outlive a parent that is
killed by SIGKILL. The kernel watches the parent's *thread*: whoever starts a child this way does
it from a thread that lives as long as the process, the main one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_OK = 0
EXIT_FAILED = 1  # an error nobody foresaw; the log has its traceback
EXIT_STARTUP = 2  # configuration or start-up; one line on standard error
EXIT_BROKER_LOST = 3  # the connection to NATS was closed for good

READY_VARIABLE = "TINSMITH_READY_FD"
PARENT_VARIABLE = "TINSMITH_PARENT_PID"
_PR_SET_PDEATHSIG = 1
# Loaded here and not in the child: between fork and exec nothing may take a lock.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def tied_to(parent_pid: int) -> Callable[[], None]:
    """A ``preexec_fn``: the child gets SIGKILL when ``parent_pid`` dies, even during its start."""

    def tie() -> None:
        if _LIBC is None:
            return
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)

    return tie


def tie_to_parent() -> None:
    """For a child: ties it to the process ``$TINSMITH_PARENT_PID``, if set.

    The variable is removed, so that this process's own children are not bound by it.
    """
    parent_pid = os.environ.pop(PARENT_VARIABLE, "")
    if parent_pid.isdigit():
        tied_to(int(parent_pid))()


def tell_ready(message: dict[str, object]) -> None:
    """For a child: one line of JSON to the descriptor ``$TINSMITH_READY_FD``, if set; once."""
    text = os.environ.pop(READY_VARIABLE, "")
    if not text:
        return
    try:
        with open(int(text), "w") as pipe:
            pipe.write(json.dumps({"ready": message}) + "\n")
    except (ValueError, OSError) as error:
        raise StartupError(
            f"{READY_VARIABLE}: {text!r} is not a descriptor that can be written to ({error}); "
            "unset it, or have the parent pass the write end of a pipe"
        ) from error
