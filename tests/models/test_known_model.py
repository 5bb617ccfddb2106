"""What is known of a model is asked once, and again when the model has changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.adapter import LayerAdapter, LowRankAdapter
from penstock.models import known_model
from penstock.models.known_model import KnownModel
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import random_adapter
from penstock.testing.tiny_models import tiny_model


def test_a_model_is_asked_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def count(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            asked.append(name)
            return own(*given)

        return counted

    for name in ("fingerprint", "key_rotations", "first_look"):
        monkeypatch.setattr(known_model, name, count(name, getattr(known_model, name)))
    model, known = tiny_model("llama"), KnownModel()
    shape = inspect_model(model)

    def ask() -> tuple[str, torch.dtype]:
        answers = known.look(model)
        answers.rotations(shape)
        return answers.fingerprint(), answers.first_look(shape)[0].dtype

    first = ask()
    assert ask() == first
    assert len(asked) == 3, "found again"
    one, other = (known.look(model).rotations(shape) for _ in range(2))
    assert one[0] is one[-1] is not other[0], "a cache's tables are its own"
    layer: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        layer.weight[0] += 1
    second = ask()
    assert second != first, "written to"
    layer.weight = torch.nn.Parameter(layer.weight.detach() + 1)
    assert ask() not in (first, second), "replaced"
    model.to(torch.bfloat16)
    assert ask()[1] == torch.bfloat16


def test_an_adapter_is_read_again_when_its_file_has_changed(tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "adapter.safetensors"

    def save(seed: int) -> None:
        made = random_adapter(model, seed)
        layers = [LayerAdapter(each.basis.clone(), each.peak.clone()) for each in made.layers]
        LowRankAdapter(layers, made.fingerprint, 0).save(path)

    save(0)
    answers = KnownModel().look(model)
    first = answers.adapter(path)
    assert answers.adapter(path) is first
    save(1)
    assert not torch.equal(answers.adapter(path).layers[0].basis, first.layers[0].basis)
