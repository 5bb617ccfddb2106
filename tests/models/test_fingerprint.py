"""A fingerprint follows the weights and the positions, and nothing else."""

import pytest
import torch

from penstock.models.fingerprint import fingerprint
from penstock.testing.tiny_models import tiny_model


def test_the_dtype_does_not_count() -> None:
    model = tiny_model("llama")
    digest = fingerprint(model)
    assert fingerprint(model.to(torch.bfloat16)) == digest
    assert fingerprint(tiny_model("llama")) == digest, "the same weights, another object"


def test_weights_count() -> None:
    digest = fingerprint(tiny_model("llama"))
    assert fingerprint(tiny_model("llama", seed=1)) != digest
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
    assert fingerprint(model) != digest


def test_positions_count() -> None:
    model = tiny_model("llama")
    digest = fingerprint(model)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 1e6}
    assert fingerprint(model) != digest


@pytest.mark.parametrize("family", ["qwen3", "opt", "gemma3"])
def test_families_differ(family: str) -> None:
    assert fingerprint(tiny_model(family)) != fingerprint(tiny_model("llama"))
