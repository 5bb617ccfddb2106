"""rotary_of(): a model's rotary embedding as a plain function of positions."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.policies.base import Rotary


def rotary_of(model: PreTrainedModel) -> Rotary | None:
    """The rotary embedding of a model whose layers share one built like Llama's; else None."""
    module: Any = getattr(model.base_model, "rotary_emb", None)
    if module is None:
        return None

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(1, 1, 1, dtype=torch.float32, device=positions.device)
        with torch.no_grad():
            cos, sin = module(like, positions[None])
        return cos[0].float(), sin[0].float()

    device = model.get_input_embeddings().weight.device
    try:
        cos, _ = rotary(torch.arange(2, device=device))
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
        return None
    return rotary if cos.dim() == 2 else None
