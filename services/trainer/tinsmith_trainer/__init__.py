"""The trainer: one base model, many adapters, their gradients and their optimizers."""
