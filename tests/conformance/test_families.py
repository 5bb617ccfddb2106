"""Decoder families of transformers: each works or is refused by name, and nothing else."""

import pytest

from penstock.models.model_shape import FULL
from penstock.testing.family_sweep import run, sweep_family
from penstock.testing.tiny_families import tiny_config, tiny_family

OTHER_ROTATIONS = ("codegen", "cohere", "gpt_neox", "glm")
WORKS = (
    "bart", "cohere", "exaone4", "gemma2", "glm4", "gpt2", "gpt_bigcode", "gpt_oss",
    "minimax_m2", "nemotron", "olmoe", "phi", "qwen3_moe", "stablelm",
)  # fmt: skip
REFUSED = {
    "bloom": "attention interface", "deepseek_v3": "latent attention", "falcon_h1": "layer 0",
    "diffllama": "never received", "mamba": "layer 0|no attention heads",
    "mllama": "cross-attention",
}  # fmt: skip


@pytest.mark.parametrize("family", WORKS)
def test_works_with_the_default_policy(family: str) -> None:
    result = sweep_family(family, ("kvswap",))
    assert (result.outcome, result.words) == ("works", "")


@pytest.mark.parametrize("family", OTHER_ROTATIONS)
def test_keys_are_turned_back_as_the_model_turned_them(family: str) -> None:
    """By halves, by neighbours, or in part."""
    result = sweep_family(family, ("shadowkv",), ("full",))
    assert (result.outcome, result.words) == ("works", "")


@pytest.mark.parametrize("family", REFUSED)
def test_refused_at_once(family: str) -> None:
    result = sweep_family(family, ("kvswap", "full"))
    assert result.outcome == "refused", result
    assert any(word in result.words for word in REFUSED[family].split("|"))


def test_layers_of_two_kinds_are_mixed() -> None:
    kinds = list(tiny_config("gemma2").layer_types)
    assert kinds.count(FULL) == 2
    assert len(kinds) == 4


def test_a_sweep_sees_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's answers are no answers; what a family raises is told, not raised."""
    model, other = tiny_family("llama"), tiny_family("llama", seed=1)
    from penstock.testing import family_sweep

    expected = family_sweep._generate(other, None)
    for setting in family_sweep.SETTINGS[1:]:
        assert run(model, "kvswap", setting, expected) is not None
    monkeypatch.setattr(family_sweep, "run", lambda *_: 1 / 0)
    result = sweep_family("llama", ("full",))
    assert (result.outcome, result.words.split(":")[0]) == ("fails", "full, fetched")
