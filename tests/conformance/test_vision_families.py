"""The committed sweep of models that see, and the sweep's own eye."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import DynamicCache

from penstock.methods import POLICIES
from penstock.testing import vision_sweep
from penstock.testing.tiny_vision import VISION_FAMILIES, tiny_vision_model

DOCS = Path(__file__).parents[2] / "docs"


def test_the_committed_sweep_is_of_all_families_and_policies() -> None:
    found: Any = json.loads((DOCS / "vision-families.json").read_text(encoding="utf-8"))
    assert [each["family"] for each in found["families"]] == list(VISION_FAMILIES)
    for each in found["families"]:
        assert each["outcome"] == ("refused" if each["family"] == "gemma3" else "works")
        assert each["outcome"] == "refused" or each["policies"] == list(POLICIES)
        assert set(each["life"].values()) == {"right"}
    page = (DOCS / "vision-families.md").read_text(encoding="utf-8")
    assert page == vision_sweep.table(found)


def test_a_sweep_sees_another_picture() -> None:
    """Its answers are no answers."""
    loaded = tiny_vision_model("llava")
    inputs = vision_sweep._batch(loaded)
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
    cache = DynamicCache(config=loaded.model.config)
    expected = vision_sweep._generate(loaded, cache, other)
    with pytest.raises(vision_sweep.Wrong, match="from the plain model's"):
        vision_sweep._run(loaded, "full", "exact", inputs, expected)
