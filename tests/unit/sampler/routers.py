"""Where transformers' own router sends tokens."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM


def true_routes(folder, tokens):
    """Of each token but the last, the experts of each layer: int [tokens - 1, layers, k]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    k = model.config.num_experts_per_tok
    with torch.no_grad():
        ids = torch.tensor([list(map(int, tokens))[:-1]])
        layers = model(ids, output_router_logits=True).router_logits
    return torch.stack([layer.topk(k, -1).indices for layer in layers], 1).numpy()
