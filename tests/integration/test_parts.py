"""Which service needs what: the gateway and the checkpointer start on a machine without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "safetensors", "tokenizers")
PROGRAM = """
import sys
for name in {heavy}:
    sys.modules[name] = None  # any import of it raises ImportError
from tinsmith import lifeline
from tinsmith.cli import main
sys.argv = ["tinsmith", {service!r}]
main()
"""


@pytest.mark.parametrize("service", ["gateway", "checkpointer"])
def test_it_becomes_ready_without_torch(service, broker, tmp_path):
    program = PROGRAM.format(heavy=HEAVY, service=service)
    environ = {
        "TINSMITH_NATS_URL": broker.url,
        "TINSMITH_DATA_DIR": str(tmp_path / "data"),
        "TINSMITH_GATEWAY__PORT": "0",
        "TINSMITH_GATEWAY__API_KEYS": '["tml-test"]',
        "TINSMITH_LOGS__FORMAT": "json",
        "PATH": "/usr/bin:/bin",
    }
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if '"ready"' in line:
                process.terminate()
        assert process.wait(20) == 0, "".join(lines)
    assert any('"ready"' in line for line in lines), "".join(lines)
