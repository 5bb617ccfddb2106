"""Queries of a stated likeness: within a segment, across its end, and what methods make of them."""

from pathlib import Path

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.slot_plan import SlotPlan
from penstock.engine.device_tier.device_index import Wanted
from penstock.evaluate.result import Result
from research.device_tier import speed
from research.device_tier.streamed_index import QueryStream, StatedUnits

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
        "--config", "tiny", "--layers", "2", "--on", "cpu", "--patterns", "700/120", "--batches",
        "2", "--steps", "8", "--step-seconds", "1000", "--places", "2", "--methods",
    ]  # fmt: skip
    once, pages = f"louiskv:{OPTIONS}", f"arkvale:{OPTIONS}"
    hits = []
    for sameness, methods in (("0.95", [once, pages]), ("0.5", [pages])):
        out = tmp_path / f"{sameness}.json"
        speed.run([*common, ";".join(methods), "--sameness", sameness, "--out", str(out)])
        rows = {row["method"]: row["places"] for row in Result.load(out).figures["rows"]}
        assert all(place["units_wanted"] > 0 for places in rows.values() for place in places)
        for place in rows.get(once, []):
            assert place["mean_segment"] == pytest.approx(SEGMENT, rel=0.02)
            assert place["retrieval_share"] == pytest.approx(1 / SEGMENT, rel=0.02)
        hits.append(rows[pages][0]["hit_rate"])
        assert rows[pages][0]["retrieval_share"] == 1.0
    assert hits[0] > hits[1] + 0.1


def test_stated_shares_are_what_is_found(tmp_path: Path) -> None:
    """Hits of methods that retrieve at turns, and of those that do at every step; not where the
    cache has too little to choose from."""
    turn, step = 0.2, 0.9
    common = [
        "--config", "tiny", "--layers", "2", "--on", "cpu", "--patterns", "900/200", "--batches",
        "2", "--steps", "10", "--step-seconds", "1000", "--sameness", "0.95", "--stays",
        f"{turn}/{step}", "--segment", "5", "--places", "2",
        "--methods", f"louiskv:{OPTIONS};arkvale:{OPTIONS};louiskv:predict=true,{OPTIONS}",
    ]  # fmt: skip
    result = speed.run([*common, "--out", str(tmp_path / "stated.json")])
    louis, pages, ahead = result.figures["rows"]
    for row, share in ((louis, turn), (pages, step), (ahead, turn)):
        assert row["stated"] == [True] * len(row["places"])
        for place in row["places"]:
            assert place["hit_rate"] == pytest.approx(share, abs=0.06)
    for place in louis["places"]:
        assert place["mean_segment"] == pytest.approx(5, rel=0.05)
    again = speed.run([*common, "--out", str(tmp_path / "stated.json"), "--resume"])
    assert again.figures["rows"] == result.figures["rows"]
    with pytest.raises(ConfigError, match="stays"):
        speed.run(
            [*common, "--stays", "0.5/0.5", "--out", str(tmp_path / "stated.json"), "--resume"]
        )


def test_what_cannot_be_stated(tmp_path: Path) -> None:
    for text in ("0.5", "0.5/1.5", "-1/0.5", "a/b"):
        with pytest.raises(ConfigError, match="two shares of 0 to 1"):
            speed.parse_arguments(["--on", "cpu", f"--stays={text}"])
    result = speed.run([
        "--config", "tiny", "--on", "cpu", "--patterns", "60/90", "--batches", "1", "--steps", "4",
        "--stays", "1/1", "--methods", f"louiskv:{OPTIONS}", "--out", str(tmp_path / "few.json"),
    ])  # fmt: skip
    (row,) = result.figures["rows"]
    assert row["stated"] == [False] * 3, "64 of 150 at most"
    assert "error" not in row


def test_selections_are_distinct_and_in_reach() -> None:
    queries = stream(0.9, sequences=2)
    plan = SlotPlan(
        batch=6, max_units=400, group_tokens=2, selected_units=32, num_slots=32, sink_slots=3,
        window_slots=8, shared_every=0, compact=False, index_bytes=0, fixed_bytes=0,
        unit_bytes=0, staging_slots=0, pool_bytes=0,
    )  # fmt: skip
    stated = StatedUnits(queries, plan, at_turns=True, stays=0.5)
    assert stated.state(600)
    wanted = Wanted(
        torch.zeros(6, 32, dtype=torch.int32), torch.ones(6, 32, dtype=torch.bool),
        torch.ones(6, dtype=torch.bool),
    )  # fmt: skip
    shares, before = [], None
    for position in range(600, 1000):
        stated.write(1, torch.tensor([position]), wanted)
        assert all(len(set(row)) == 32 for row in wanted.ids.tolist())
        assert int(wanted.ids.min()) >= 3
        assert int(wanted.ids.max()) < 300 - 8
        if before is not None:
            shares.append((wanted.ids == before).float().mean(dim=1))
        before = wanted.ids.clone()
    same = torch.stack(shares)
    turns = same < 1
    assert turns.float().mean() == pytest.approx(1 / SEGMENT, rel=0.05)
    assert same[turns].mean() == pytest.approx(0.5, abs=0.03)
    assert (turns[:, :3] == turns[:, :1]).all(), "heads of a sequence turn together"
    assert not stated.state(140)
    stated.write(1, torch.tensor([700]), wanted)
    assert before is not None
    assert torch.equal(wanted.ids, before), "the method's own stay"
