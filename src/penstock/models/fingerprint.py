"""A model's fingerprint: changes with its weights, its shapes and its rotary embedding."""

import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.models.model_shape import decoder_config
from penstock.models.packed.modules import packed_modules
from penstock.models.weight_access import persistent_buffers, plain_parts, readable_weight

_SAMPLED_VALUES = 512
_FIELDS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rope_theta", "rope_parameters", "rope_scaling", "layer_types", "vocab_size",
)  # fmt: skip


def fingerprint(model: PreTrainedModel) -> str:
    """Digest of the configuration and of values sampled from every weight matrix.

    The dtype does not count: weights are compared as bfloat16, so that an adapter fitted in float32
    serves the same model in bfloat16. Offloaded weights are read from where they are, and so are
    matrices that a quantiser keeps as buffers. Of packed weights the scales count, and the bits.

    Raises:
        UnsupportedModelError: a weight's values cannot be read; names it.
    """
    config = decoder_config(model)
    fields = {name: getattr(config, name, None) for name in _FIELDS}
    digest = hashlib.blake2b(json.dumps(fields, sort_keys=True, default=str).encode())
    packed = packed_modules(model)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        # Offloading makes two of a tied weight, of which a model in memory has one.
        if tensor.ndim < 2 or (tensor.device.type == "meta" and name in tied):
            continue
        path, _, own = name.rpartition(".")
        if path in packed and own in packed[path].forms:
            for matrix in packed[path].matrices(own):
                digest.update(f"{name} int{matrix.bits}".encode() + _sample(matrix.scales))
            continue
        for part, weight in plain_parts(name, readable_weight(model, name, tensor)):
            digest.update(part.encode() + _sample(weight))
    return digest.hexdigest()[:32]


def _sample(weight: Tensor) -> bytes:
    flat = weight.detach().flatten()
    step = max(1, flat.numel() // _SAMPLED_VALUES)
    return flat[::step].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
