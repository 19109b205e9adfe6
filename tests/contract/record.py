"""Records the bytes of messages that have none yet: python -m tests.contract.record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.contract.samples import samples

from tinsmith.messages.base import encode

GOLDEN = Path(__file__).with_name("golden.json")


def main() -> int:
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for name, sample in sorted(samples().items()):
        known.setdefault(name, encode(sample).hex())
    GOLDEN.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
