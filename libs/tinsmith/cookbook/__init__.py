"""Runs the recipes of tinker-cookbook, unmodified, against this server (``docs/cookbook.md``).

``command`` runs where Tinsmith is installed. All else runs in the cookbook's own environment, as
``python -m tinsmith.cookbook RECIPE``, and needs of Tinsmith nothing but the standard library.
"""

from __future__ import annotations

TOKENIZERS = "TINSMITH_COOKBOOK_TOKENIZERS"
"""Variable that tells where tokenizers are: JSON, from model name to folder or hub id."""
