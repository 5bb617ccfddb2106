"""A graph decoder stands before a model's `forward` and leaves what was there as it was."""

import weakref
from typing import Any

import pytest

from penstock.models.graph_decoder import GraphDecoder
from penstock.testing.tiny_models import tiny_model


class Cache:
    """Stands for one that nobody steps."""


def decoders(model: Any, count: int) -> list[GraphDecoder]:
    runtime: Any = None
    cache: Any = weakref.ref(Cache())
    return [GraphDecoder(model, cache, runtime) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_models_own_forward_comes_back(count: int) -> None:
    model: Any = tiny_model("llama")
    for decoder in decoders(model, count):
        decoder.remove()
    assert "forward" not in model.__dict__

    def own(*args: Any, **kwargs: Any) -> str:
        return "mine"

    model.forward = own
    standing = decoders(model, count)
    assert model.forward is not own
    assert model.forward(1) == "mine"
    for decoder in standing:
        decoder.remove()
        assert model.forward is own
        decoder.remove()
    assert model.forward is own
