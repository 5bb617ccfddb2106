"""key_rotations(): what turns keys is found by asking layers; None where nothing fits."""

import pytest
import torch

from penstock.engine.attention_call import AttentionCall
from penstock.models.attention_adapter import Attachment, mark_keys
from penstock.models.cache_argument import OUTPUT_NAME
from penstock.models.key_rotations import key_rotations
from penstock.models.model_shape import inspect_model
from penstock.testing.tiny_families import tiny_family

KNOWN = {
    "llama": (8, False), "gpt_neox": (2, False), "cohere": (8, True), "glm": (4, True),
    "gpt_oss": (8, False), "gemma3_text": (8, False),
}  # fmt: skip
"""Pairs of a head of 16 that turn, and whether they are neighbours."""


@pytest.mark.parametrize("family", KNOWN)
def test_known_families(family: str) -> None:
    model = tiny_family(family)
    found = key_rotations(model, inspect_model(model))
    assert {None if each is None else (each.pairs, each.interleaved) for each in found} == {
        KNOWN[family]
    }
    assert len(set(map(id, found))) == 1, "layers that turn alike share an object"


@pytest.mark.parametrize("family", ["opt", "gpt2", "cohere2", "llama4_text"])
def test_families_without_one(family: str) -> None:
    """Learned positions, full layers that do not turn, and a form that is not known."""
    model = tiny_family(family)
    assert not any(key_rotations(model, inspect_model(model)))


def test_a_layer_without_one() -> None:
    model = tiny_family("smollm3")
    found = key_rotations(model, inspect_model(model))
    assert [each is not None for each in found] == [True, True, True, False]


@pytest.mark.parametrize(
    ("scaling", "known"),
    [
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, True),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}, True),
        ({"rope_type": "dynamic", "factor": 4.0}, False),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_scaled_kinds(scaling: dict[str, object], known: bool) -> None:
    model = tiny_family("llama")
    config = model.config
    config.rope_parameters = {**scaling, "rope_theta": 1e4}
    scaled = type(model)(config)
    found = key_rotations(scaled, inspect_model(scaled))
    assert all(each is not None for each in found) == known


def test_keys_turn_as_queries_do() -> None:
    """What attention gets at position 40 is what it gets at 0, turned; with the same hidden state:
    all tokens are alike, and so is all that they see."""
    model = tiny_family("qwen3")
    shape = inspect_model(model)
    rotation = key_rotations(model, shape)[0]
    assert rotation is not None
    seen: list[torch.Tensor] = []

    class Looking:
        def update(
            self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            mark_keys(keys, attend)
            return keys, values

        def get_seq_length(self, *_: object) -> int:
            return 0

    def attend(call: AttentionCall) -> torch.Tensor:
        seen.append(call.keys)
        raise StopIteration

    attachment = Attachment(model)
    try:
        hidden = torch.randn(1, 1, 64).expand(1, 41, -1)
        places = torch.arange(41)[None]
        with torch.no_grad(), pytest.raises(StopIteration):
            model.model.layers[2](
                hidden, position_embeddings=model.model.rotary_emb(hidden, places),
                attention_mask=None, **{OUTPUT_NAME: Looking()},
            )  # fmt: skip
    finally:
        attachment.detach()
    expected = rotation.turned(seen[0][:, :, :1], torch.arange(41))
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-4)
