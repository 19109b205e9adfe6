"""Checkpoints as folders that other tools read and write, and back."""
