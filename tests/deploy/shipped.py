"""nats-server as it is shipped: the files of deploy/nats, on free ports of this machine."""

from __future__ import annotations

import os
import re
import urllib.parse
from pathlib import Path

from nats.aio.client import Client

from tinsmith.broker import Broker
from tinsmith.bus.permissions import OPERATOR, REGION, inbox_prefix
from tinsmith.bus.roles import ROLES
from tinsmith.config import BusConfig

ROOT = Path(__file__).parents[2]
NATS = ROOT / "deploy" / "nats"
USERS = (*ROLES, OPERATOR)


def password(user):
    return f"p-of-{user}-7f3a"


def variables(tls, store):
    """What the shipped files take from the environment."""
    return {f"NATS_{user.upper()}_PASSWORD": password(user) for user in (*USERS, REGION)} | {
        "NATS_TOKEN": "t-of-dev",
        "NATS_TLS_CERT": str(tls.cert),
        "NATS_TLS_KEY": str(tls.key),
        "NATS_TLS_CA": str(tls.ca),
        "NATS_STORE": str(store),
        "NATS_NAME": "nats-0",
        "NATS_ROUTES": "[tls://127.0.0.1:6222]",
        "NATS_HUB": f"[tls://{REGION}:{password(REGION)}@127.0.0.1:7422]",
    }


async def enter(place, **options):
    """Connect once, and leave nothing behind, whether or not one is let in."""
    client = Client()
    try:
        await client.connect(place, allow_reconnect=False, **options)
    finally:
        await client.close()


class ShippedBroker(Broker):
    """Runs one of the shipped files; ``changes`` are pairs of a text in it and its place."""

    def __init__(self, file, folder, tls, *, changes=(), more=None):
        super().__init__(folder / "store", folder / "run")
        self._file = NATS / file
        self._changes = changes
        self.tls = tls
        self.environ = variables(tls, folder / "store") | (more or {})

    def _write_config(self):
        self._run.mkdir(parents=True, exist_ok=True)
        for stale in self._run.glob("nats-server_*.ports"):
            stale.unlink()
        text = re.sub(r"(?m)^include (\S+)", self._included, self._file.read_text())
        text = re.sub(r'(?m)^listen: "[^"]*"', f'listen: "127.0.0.1:{self._port}"', text)
        text = re.sub(r'(?m)^http: "[^"]*"', 'http: "127.0.0.1:-1"', text)
        for theirs, wanted in self._changes:
            assert theirs in text, theirs
            text = text.replace(theirs, wanted)
        path = self._run / "nats.conf"
        path.write_text(f'ports_file_dir: "{self._run}"\n{text}')
        return path

    def _included(self, match):
        # Only files below the folder of the one that includes them can be named.
        (self._run / match[1]).write_text((NATS / match[1]).read_text())
        return match[0]

    def spawn(self, output=None):
        before = dict(os.environ)
        os.environ.update(self.environ)
        try:
            super().spawn(output)
        finally:
            os.environ.clear()
            os.environ.update(before)

    @property
    def place(self):
        """The address, without anybody's password."""
        return f"tls://127.0.0.1:{urllib.parse.urlsplit(self._known_ports().nats).port}"

    @property
    def said(self):
        return (self._run / "nats.log").read_text()

    def bus_config(self, user, **others):
        """How ``user`` connects."""
        return BusConfig(
            **{
                "url": self.place,
                "user": user,
                "password": password(user),
                "inbox_prefix": inbox_prefix(user),
                "tls_ca": str(self.tls.ca),
                "create_streams": user == OPERATOR,
                "connect_timeout_s": 30.0,
                **others,
            }
        )
