"""rotary_of(): a model's rotary embedding as a plain function of positions."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.policy import Rotary
from penstock.models.weight_access import model_device


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

    device = model_device(model)
    try:
        cos, sin = rotary(torch.arange(3, device=device))
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
        return None
    return rotary if _is_by_halves(cos) and _is_by_halves(sin) else None


def _is_by_halves(part: Tensor) -> bool:
    """Whether component i turns with component i + half; Cohere's turn with their neighbours."""
    return part.dim() == 2 and part.shape[1] % 2 == 0 and torch.equal(*part.chunk(2, dim=1))
