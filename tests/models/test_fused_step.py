"""Parts of a model replaced for a step: which, the same bits by the twins, and all put back."""

import sys
from contextlib import suppress
from typing import Any

import pytest
import torch

from penstock.models import fused_step
from penstock.models.fused_step import fused_parts
from penstock.testing.tiny_models import FAMILIES, VOCABULARY, tiny_model


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel is called."""
    counts: dict[str, int] = {}

    def counting(name: str, call: Any) -> Any:
        def counted(*args: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return call(*args)

        return counted

    for name in ("rms_norm", "gated", "rotate"):
        monkeypatch.setattr(fused_step, name, counting(name, getattr(fused_step, name)))
    return counts


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, use_cache=False).logits
    return found


def state(model: Any) -> tuple[Any, ...]:
    own = [("forward" in module.__dict__) for module in model.modules()]
    sources = {type(module).__module__ for module in model.modules()}
    names = [vars(sys.modules[source]).get("apply_rotary_pos_emb") for source in sorted(sources)]
    return own, names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same(
    family: str, dtype: torch.dtype, called: dict[str, int]
) -> None:
    """To the bit, on a CPU, where the kernels are their twins: one token, and a prompt."""
    model = tiny_model(family).to(dtype)
    random = torch.Generator().manual_seed(2)
    before = state(model)
    for tokens in (1, 7):
        ids = torch.randint(3, VOCABULARY, (2, tokens), generator=random)
        expected = logits(model, ids)
        with fused_parts(model):
            assert torch.equal(logits(model, ids), expected)
    assert state(model) == before
    layers = model.config.num_hidden_layers
    if family in ("llama", "mistral", "qwen2"):
        # Rotations of one token alone; norms, of the last one too, and gates of any number.
        assert called == {"rms_norm": 2 * (2 * layers + 1), "gated": 2 * layers, "rotate": layers}
    if family == "qwen3":
        assert called["rms_norm"] > 2 * (2 * layers + 1)  # queries and keys have norms, too
    if family in ("gemma2", "gpt_neox", "opt"):
        assert "rms_norm" not in called
        assert "gated" not in called


def test_what_somebody_else_has_replaced_stays(called: dict[str, int]) -> None:
    model: Any = tiny_model("llama")
    norm = model.model.layers[1].input_layernorm
    own = norm.forward
    norm.forward = lambda hidden_states: own(hidden_states) + 1
    ids = torch.tensor([[5]])
    expected, theirs = logits(model, ids), norm.forward
    with fused_parts(model):
        assert norm.forward is theirs
        assert torch.equal(logits(model, ids), expected)
    assert norm.forward is theirs
    assert called["rms_norm"] == 2 * model.config.num_hidden_layers


def test_all_is_put_back_when_a_step_fails() -> None:
    model = tiny_model("llama")
    before = state(model)
    with suppress(RuntimeError), fused_parts(model):
        assert state(model) != before
        raise RuntimeError("what a recording says")
    assert state(model) == before


def test_another_formula_under_the_same_names_is_left_alone() -> None:
    model: Any = tiny_model("llama")
    kind = type(model.model.norm)
    own = kind.forward
    other = type("Other", (kind,), {"forward": lambda self, states: own(self, states) * 1.01})
    norm = other(48)
    model.model.norm = norm
    with fused_parts(model):
        assert "forward" not in norm.__dict__
        assert "forward" in model.model.layers[0].input_layernorm.__dict__


def test_it_does_nothing_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_step, "ENABLED", False)
    model = tiny_model("llama")
    before = state(model)
    with fused_parts(model):
        assert state(model) == before
