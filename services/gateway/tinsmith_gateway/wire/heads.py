"""The head of a model's log as metrics, which are numbers: how a client gets something to keep.

``log_seq`` is the op, ``log_head_a`` and ``log_head_b`` are the first 96 bits of the blake3 of
its record: two numbers of 48 bits, which a double holds exactly. The client reduces metrics over
the chunks of a call by the end of their names; ``unique`` keeps them apart: chunk 0 has the name
itself, chunk n has ``_n`` behind it.
"""

from __future__ import annotations

DIGITS = 12  # hexadecimal, of each half


def head_metrics(seq: int, blake3: str) -> dict[str, float]:
    """Of the record of op ``seq``, whose bytes have the digest ``blake3`` (hex)."""
    return {
        "log_seq:unique": float(seq),
        "log_head_a:unique": float(int(blake3[:DIGITS], 16)),
        "log_head_b:unique": float(int(blake3[DIGITS : 2 * DIGITS], 16)),
    }
