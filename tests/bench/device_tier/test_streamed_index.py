"""Queries of a stated likeness: within a segment, across its end, and what methods make of them."""

from pathlib import Path

import pytest
import torch

from penstock.bench.device_tier import speed
from penstock.bench.device_tier.streamed_index import QueryStream
from penstock.bench.result import Result

SEGMENT = 8
OPTIONS = "selected_tokens=64,window_tokens=16,sink_tokens=4"


def stream(sameness: float, sequences: int = 3) -> QueryStream:
    return QueryStream(
        sequences=sequences, heads=8, head_dim=64, layers=4, segment=SEGMENT, sameness=sameness,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def cosines(queries: QueryStream, layer: int, steps: int) -> torch.Tensor:
    """Of each step with the one before, the mean over heads. [steps - 1, sequences]"""
    found = torch.cat([queries.query(layer, torch.tensor([p])) for p in range(steps)])
    return torch.cosine_similarity(found[1:], found[:-1], dim=-1).mean(dim=-1)


@pytest.mark.parametrize("sameness", [0.9, 0.6])
def test_steps_are_as_alike_as_stated(sameness: float) -> None:
    found = cosines(stream(sameness), layer=1, steps=600)
    turns = found < sameness / 2
    assert found[~turns].mean() == pytest.approx(sameness, abs=0.03)
    assert found[turns].mean() == pytest.approx(0.0, abs=0.05)
    assert found[~turns].min() > 0.7 * sameness
    for sequence in range(3):
        places = turns[:, sequence].nonzero()[:, 0]
        assert places.diff().eq(SEGMENT).all()
        assert len(places) == pytest.approx(600 / SEGMENT, abs=1)


def test_layers_and_sequences_turn_at_different_steps() -> None:
    queries = stream(0.9)
    turns = [cosines(queries, layer, 40) < 0.45 for layer in range(3)]
    first = {int(turn[:, s].nonzero()[0]) for turn in turns for s in range(3)}
    assert len(first) > 4


def test_heads_are_independent() -> None:
    query = stream(0.9).query(0, torch.tensor([5]))[0]
    alike = torch.cosine_similarity(query[:, :1], query[:, 1:], dim=-1)
    assert alike.abs().mean() < 0.25


def test_boundaries_and_pages_follow_the_stream(tmp_path: Path) -> None:
    """LouisKV retrieves once a segment; ArkVale's pages overlap the more the queries do."""
    common = [
        "--config", "tiny", "--on", "cpu", "--patterns", "700/120", "--batches", "2", "--steps",
        "24", "--methods",
        f"louiskv:{OPTIONS};arkvale:{OPTIONS}",
    ]  # fmt: skip
    hits = []
    for sameness in ("0.95", "0.5"):
        out = tmp_path / f"{sameness}.json"
        speed.run([*common, "--sameness", sameness, "--out", str(out)])
        louis, pages = Result.load(out).figures["rows"]
        places = louis["places"] + pages["places"]
        assert all(place["units_wanted"] > 0 for place in places)
        if sameness == "0.95":
            for place in louis["places"]:
                assert place["mean_segment"] == pytest.approx(SEGMENT, rel=0.02)
                assert place["retrieval_share"] == pytest.approx(1 / SEGMENT, rel=0.02)
        hits.append(pages["places"][0]["hit_rate"])
        assert pages["places"][0]["retrieval_share"] == 1.0
    assert hits[0] > hits[1] + 0.1
