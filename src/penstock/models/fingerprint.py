"""A model's fingerprint: changes with its weights, its shapes and its rotary embedding."""

import hashlib
import json

import torch
from transformers import PreTrainedModel

from penstock.models.model_shape import decoder_config

_SAMPLED_VALUES = 512
_FIELDS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rope_theta", "rope_parameters", "rope_scaling", "layer_types", "vocab_size",
)  # fmt: skip


def fingerprint(model: PreTrainedModel) -> str:
    """Digest of the configuration and of values sampled from every weight matrix.

    The dtype does not count: weights are compared as bfloat16, so that an adapter fitted in float32
    serves the same model in bfloat16.
    """
    config = decoder_config(model)
    fields = {name: getattr(config, name, None) for name in _FIELDS}
    digest = hashlib.blake2b(json.dumps(fields, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or weight.device.type == "meta":
            continue
        flat = weight.detach().flatten()
        step = max(1, flat.numel() // _SAMPLED_VALUES)
        sample = flat[::step].to("cpu", torch.bfloat16).view(torch.int16).numpy()
        digest.update(name.encode() + sample.tobytes())
    return digest.hexdigest()[:32]
