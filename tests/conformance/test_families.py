"""Decoder families of transformers: each works or is refused by name, and nothing else."""

import json
import os
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from penstock.methods import POLICIES
from penstock.models.model_shape import FULL
from penstock.models.recurrent_layers import HAS_RECURRENT_LAYERS
from penstock.testing.family_sweep import SETTINGS, Setting, run, sweep_family, table
from penstock.testing.tiny_families import decoder_families, tiny_config, tiny_family

DOCS = Path(__file__).parents[2] / "docs"
OTHER_ROTATIONS = ("codegen", "cohere", "gpt_neox", "glm")
WORKS = (
    "bart", "cohere", "deepseek_v3", "exaone4", "gemma2", "glm4", "gpt2", "gpt_bigcode", "gpt_oss",
    "olmoe",
)  # fmt: skip
"""One of each kind; `make sweep` runs all."""
REFUSED = {
    "bloom": "attention interface", "diffllama": "never received",
    "mamba": "no layer of|no attention heads|state-space",
    "mllama": "cross-attention",
}  # fmt: skip


def require_interface(family: str) -> None:
    """Skip a family that goes through the attention interface in newer releases only."""
    if not tiny_family(family)._can_set_attn_implementation():
        pytest.skip("without the attention interface in this transformers")


@pytest.mark.parametrize(
    ("family", "exactly"), list(zip(WORKS, cycle(("exact", "full")), strict=False))
)
def test_works_with_the_default_policy(family: str, exactly: Setting) -> None:
    require_interface(family)
    result = sweep_family(family, ("kvswap",), ("fetched", exactly), lives=family == "gemma2")
    assert (result.outcome, result.words) == ("works", "")


@pytest.mark.skipif(not HAS_RECURRENT_LAYERS, reason="transformers keeps their states elsewhere")
@pytest.mark.parametrize(
    ("family", "said"),
    [("zaya", "right"), ("minimax", "right"), ("jamba", "refused")],
)
def test_hybrids_go_back_to_states_alone(family: str, said: str) -> None:
    """Jamba's own code forgets its state where several tokens come behind others. MiniMax's asks
    for a class of its own."""
    result = sweep_family(family, ("quest",), ("full",))
    assert (result.outcome, result.words) == ("works", "")
    assert result.life == {
        "turns": said, "crop": "refused", "lookup": "refused", "document": said
    }  # fmt: skip


@pytest.mark.parametrize("family", OTHER_ROTATIONS)
def test_keys_are_turned_back_as_the_model_turned_them(family: str) -> None:
    """By halves, by neighbours, or in part."""
    require_interface(family)
    result = sweep_family(family, ("shadowkv",), ("full",), lives=False)
    assert (result.outcome, result.words) == ("works", "")


@pytest.mark.parametrize("family", REFUSED)
def test_refused_at_once(family: str) -> None:
    result = sweep_family(family, ("kvswap", "full"))
    assert result.outcome == "refused", result
    words = (*REFUSED[family].split("|"), "attention interface")
    assert any(word in result.words for word in words)


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


@pytest.fixture(scope="module")
def found() -> Any:
    return json.loads((DOCS / "families.json").read_text(encoding="utf-8"))


def test_the_committed_sweep_has_no_third_outcome(found: Any) -> None:
    outcomes = {each["family"]: each["outcome"] for each in found["families"]}
    assert set(outcomes.values()) <= {"works", "refused", "not built"}
    built = [family for family, outcome in outcomes.items() if outcome != "not built"]
    assert len(built) >= 100
    for each in found["families"]:
        assert each["outcome"] == "works" or each["words"]
        assert each["outcome"] != "works" or each["policies"] == list(POLICIES)
    assert found["policies"] == list(POLICIES)
    assert found["settings"] == list(SETTINGS)
    assert {*WORKS, *REFUSED} <= set(built)


def test_the_committed_sweep_is_of_all_families(found: Any) -> None:
    import transformers

    if transformers.__version__ != found["transformers"]:
        pytest.skip(f"the table is of transformers {found['transformers']}")
    assert [each["family"] for each in found["families"]] == list(decoder_families())


def test_the_page_is_that_of_the_results(found: Any) -> None:
    assert (DOCS / "families.md").read_text(encoding="utf-8") == table(found)
    assert os.path.exists(DOCS / "families.json")
