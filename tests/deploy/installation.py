"""All services as deploy/ runs them: each under its own user, over TLS, beside one broker."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.deploy.shipped import ShippedBroker, password
from tests.fault.cluster import CONFIG, LEASE_S, Cluster
from tests.integration.conftest import MODEL, Server

from tinsmith.bus.permissions import OPERATOR, inbox_prefix
from tinsmith.paths import DataDir

KEY = "tml-of-deploy-9d81"
MASTER_KEY = "bWFzdGVyLWtleS1vZi10aGUtZGVwbG95LXRlc3QtMzI="  # 32 bytes in base64


class Installation(Cluster):
    """As ``Cluster``, with the shipped broker; ``gateway`` and ``top`` are more of the file."""

    def __init__(self, folder, model_folder, tls, *, gateway="", model=""):
        self.folder = folder
        self.tls = tls
        self.config = folder / "tinsmith.toml"
        text = CONFIG.format(
            name=MODEL, folder=model_folder, key=KEY, lease=LEASE_S, gateway=gateway, trainer=""
        )
        text = text.replace("[gateway]", f"{model}\n[gateway]", 1)
        (folder / "master.key").write_text(MASTER_KEY)
        command = f"cat {folder / 'master.key'}"
        self.config.write_text(f'{text}[sealing]\nmaster_key_command = "{command}"\n')
        self.data = DataDir(folder / "data")
        self.data.prepare()
        self.broker = ShippedBroker("single.conf", folder / "broker", tls)
        self._nodes = []
        self._user = OPERATOR

    def prepare(self):
        """As the operator does it, once."""
        self.broker.start()
        assert self.audit("prepare") == (0, "")

    @property
    def environ(self):
        """Of the service that is being started, or of the operator."""
        return os.environ | {
            "TINSMITH_CONFIG": str(self.config),
            "TINSMITH_DATA_DIR": str(self.data.root),
            "TINSMITH_NATS_URL": self.broker.place,
            "TINSMITH_BUS__USER": self._user,
            "TINSMITH_BUS__PASSWORD_FILE": str(self._password_file()),
            "TINSMITH_BUS__INBOX_PREFIX": inbox_prefix(self._user),
            "TINSMITH_BUS__TLS_CA": str(self.tls.ca),
            "TINSMITH_BUS__CREATE_STREAMS": "false",
            "TINSMITH_BUS__CONNECT_TIMEOUT_S": "30",
        }

    def _password_file(self):
        file = self.folder / f"{self._user}.password"
        file.write_text(f"{password(self._user)}\n")
        return file

    def begin(self, service, **settings):
        self._user = service
        try:
            return super().begin(service, **settings)
        finally:
            self._user = OPERATOR

    def server(self, gateway):
        """What the client and raw requests need of a gateway."""
        return Server(gateway.url, KEY, self.folder, gateway.process)

    def violations(self):
        """What the broker has refused anybody."""
        return [line for line in self.broker.said.splitlines() if "iolation" in line]

    def printed(self):
        """Everything that any process has written, by file."""
        files = [*self.folder.glob("*.log"), *(self.folder / "broker").rglob("*.log")]
        return {file.name: file.read_text() for file in files}


def standard_output(command, environ):
    return subprocess.run(
        [sys.executable, "-m", "tinsmith", *command],
        env=environ, check=True, capture_output=True, text=True, timeout=300,
    ).stdout  # fmt: skip
