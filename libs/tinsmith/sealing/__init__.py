"""Payloads that can be forgotten: sealed under a key of their run, which can be destroyed."""

from tinsmith.sealing.seal import PLAIN, ClosedSeal, KeySeal, PlainSeal, Seal, aside, suited
from tinsmith.sealing.seals import Seals

__all__ = ["PLAIN", "ClosedSeal", "KeySeal", "PlainSeal", "Seal", "Seals", "aside", "suited"]
