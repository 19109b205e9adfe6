"""The trainer: one base model, many adapters, their gradients and their optimizers."""

import os

# torch reads it once, when it is loaded. Gradients and copies of adapters are large and live short:
# in pages of 4 KiB, making them takes three times as long as filling them.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
