"""The measures of `python -m research.statistics` on hand-made tensors whose answers are known."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from research.statistics.capture import Rotation, find_rotation
from research.statistics.keys import (
    drift,
    held_out,
    joined,
    rank_that_holds,
    ranks_up_to,
    recall_of_low_rank,
    same_top,
    spectrum,
    squared_distances,
)
from research.statistics.measures import (
    ReuseBuffer,
    Series,
    concentration,
    group_worth,
    inside_and_between,
    jaccard,
    mass_of_best,
    mean_cosine,
    overlap,
    segment_lengths,
    stable_part,
    tokens_that_hold,
    top_set,
)


def seen(tokens: int, padding: int = 0) -> Tensor:
    return (torch.arange(tokens) >= padding)[None]


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def sets(*members: list[int], units: int) -> Tensor:
    """One set a head. [1, heads, units]"""
    out = torch.zeros(1, len(members), units, dtype=torch.bool)
    for head, chosen in enumerate(members):
        out[0, head, chosen] = True
    return out


# Mass ------------------------------------------------------------------------------------------


def test_tokens_that_hold() -> None:
    shares = torch.tensor([[[0.05, 0.5, 0.15, 0.3], [0.25, 0.25, 0.25, 0.25]]])
    found = tokens_that_hold(shares, seen(4), (0.5, 0.8, 0.9, 0.99))
    assert found[0, 0].tolist() == [0.25, 0.5, 0.75, 1.0]
    assert found[0, 1].tolist() == [0.5, 1.0, 1.0, 1.0]


def test_padding_is_no_token() -> None:
    shares = torch.tensor([[[0.0, 0.0, 0.75, 0.25]]])
    assert tokens_that_hold(shares, seen(4, 2), (0.7, 0.8))[0, 0].tolist() == [0.5, 1.0]
    assert mass_of_best(shares, seen(4, 2), (0.5, 1.0))[0, 0].tolist() == [0.75, 1.0]


def test_mass_of_best() -> None:
    shares = torch.tensor([[[0.1, 0.6, 0.3, 0.0]]])
    # A quarter is one token, an eighth half of it, three eighths the first and half the second.
    found = mass_of_best(shares, seen(4), (0.125, 0.25, 0.375, 0.5, 1.0))[0, 0]
    assert found.tolist() == pytest.approx([0.3, 0.6, 0.75, 0.9, 1.0])
    even = torch.full((1, 1, 1000), 1 / 1000)
    assert mass_of_best(even, seen(1000), (0.0005, 0.2))[0, 0].tolist() == pytest.approx(
        [0.0005, 0.2]
    )


# Sets ------------------------------------------------------------------------------------------


def test_top_sets_leave_out_what_cannot_be_seen() -> None:
    worth = torch.tensor([[[9.0, 1.0, 3.0, 2.0]]])
    assert top_set(worth, seen(4, 1), 2)[0, 0].nonzero().flatten().tolist() == [2, 3]
    assert top_set(worth, seen(4, 1), 9)[0, 0].tolist() == [False, True, True, True]


def test_overlap_and_jaccard() -> None:
    before = sets([0, 1, 2, 3], [0, 1, 2, 3], units=6)
    now = sets([1, 2, 3, 6], [4, 5, 6, 7], units=8)  # two units more than before
    assert overlap(before, now)[0].tolist() == [0.75, 0.0]
    assert jaccard(before, now)[0].tolist() == [pytest.approx(3 / 5), 0.0]


def test_groups_are_ranked_by_their_best_token_over_heads() -> None:
    shares = torch.tensor([[
        [0.5, 0.0, 0.0, 0.0, 0.2, 0.2, 0.0, 0.0, 0.1],
        [0.0, 0.0, 0.0, 0.0, 0.4, 0.0, 0.3, 0.2, 0.1],
    ]])  # fmt: skip
    worth, full = group_worth(shares, seen(9), 4)  # the ninth token's group is not full
    assert worth[0, 0].tolist() == pytest.approx([0.25, 0.3])
    assert full.tolist() == [[True, True]]
    _, full = group_worth(shares, seen(9, 4), 4)
    assert full.tolist() == [[False, True]]


def test_concentration_and_stability() -> None:
    counts = torch.tensor([0, 10, 6, 2, 1, 1])
    assert concentration(counts) == pytest.approx(2 / 6)  # 16 of 20
    assert concentration(torch.ones(10)) == pytest.approx(0.8)
    chances = torch.tensor([10, 10, 10, 2, 10, 10])
    assert stable_part(counts, chances) == pytest.approx(12 / 20)  # the second and the fourth


def stream(units: int, size: int, keep: int, steps: int) -> list[np.ndarray]:
    """Selections of which each has `keep` units of the one before, the rest never seen again."""
    chosen, fresh, out = list(range(size)), size, []
    for _ in range(steps):
        mask = np.zeros((1, units), dtype=np.bool_)
        mask[0, chosen] = True
        out.append(mask)
        chosen = chosen[size - keep :] + list(range(fresh, fresh + size - keep))
        fresh += size - keep
    return out


def test_a_buffer_of_one_selection_hits_the_overlap() -> None:
    selections = stream(units=64, size=8, keep=6, steps=20)
    buffer = ReuseBuffer(1, 8, 64)
    rates = [buffer.take(each)[0] for each in selections]
    assert rates == [0.0] + [0.75] * 19


def test_a_buffer_of_two_selections_knows_the_one_before_last() -> None:
    even, odd = np.zeros((2, 16), dtype=np.bool_), np.zeros((2, 16), dtype=np.bool_)
    even[:, :4], odd[:, 4:8] = True, True
    small, large = ReuseBuffer(2, 4, 16), ReuseBuffer(2, 8, 16)
    for step in range(6):
        now = odd if step % 2 else even
        assert small.take(now).tolist() == [0.0, 0.0]
        assert large.take(now).tolist() == ([0.0, 0.0] if step < 2 else [1.0, 1.0])
    assert np.isnan(small.take(np.zeros((2, 16), dtype=np.bool_))).all()


def test_what_a_step_needs_is_not_evicted_by_it() -> None:
    """First in, first out: unit 0 is the oldest, but the step that brings in 3 needs it."""
    buffer = ReuseBuffer(1, 3, 8)

    def take(*units: int) -> float:
        mask = np.zeros((1, 8), dtype=np.bool_)
        mask[0, list(units)] = True
        return float(buffer.take(mask)[0])

    assert [take(0), take(1), take(2), take(0, 3)] == [0.0, 0.0, 0.0, 0.5]
    assert [take(0), take(3), take(2)] == [1.0, 1.0, 1.0]
    assert take(1) == 0.0


# Queries ---------------------------------------------------------------------------------------


def rotation_of(tokens: int, angle: float, dim: int = 8) -> Rotation:
    turns = torch.arange(tokens)[:, None] * angle * torch.ones(dim)
    return Rotation(turns.cos()[None], turns.sin()[None])


def test_a_query_turned_by_a_known_angle() -> None:
    angle = 0.3
    rotation, query = rotation_of(2, angle), noise(1, 4, 1, 8).expand(1, 4, 2, 8)
    turned = rotation.on(query)
    before, now = turned[:, :, 0], turned[:, :, 1]
    assert mean_cosine(before, now).item() == pytest.approx(math.cos(angle), abs=1e-6)
    undone = rotation.off(turned)
    assert mean_cosine(undone[:, :, 0], undone[:, :, 1]).item() == pytest.approx(1.0, abs=1e-6)
    assert (undone - query).abs().max().item() < 1e-6


def test_cosines_are_averaged_over_heads() -> None:
    before = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    now = torch.tensor([[[2.0, 0.0], [0.0, 5.0]]])
    assert mean_cosine(before, now).tolist() == [0.5]


def test_scaled_and_partial_rotations_are_undone() -> None:
    rotation = rotation_of(5, 0.7, dim=4)
    scaled = Rotation(rotation.cos * 1.2, rotation.sin * 1.2)
    vectors = noise(2, 3, 5, 10)
    assert torch.equal(scaled.on(vectors)[..., 4:], vectors[..., 4:])
    assert (scaled.off(scaled.on(vectors)) - vectors).abs().max().item() < 1e-5
    part = scaled.row(1, 2)
    assert torch.equal(part.on(vectors[1:, :, 2:]), scaled.on(vectors)[1:, :, 2:])


def test_rotations_are_told_by_what_they_do() -> None:
    rotation, plain = rotation_of(6, 0.4), noise(1, 2, 8)
    rotated = rotation.on(plain.unsqueeze(2), slice(-1, None)).squeeze(2)
    pieces = [
        (rotation.cos[:, :4], rotation.sin[:, :4]),
        (rotation.cos[:, 4:], rotation.sin[:, 4:]),
    ]
    found = find_rotation(pieces, plain, rotated)
    assert found is not None
    assert torch.equal(found.cos, rotation.cos)
    halves = [(cos[..., :4], sin[..., :4]) for cos, sin in pieces]
    found = find_rotation(halves, plain, rotated)
    assert found is not None
    assert torch.equal(found.sin, rotation.sin)
    assert find_rotation(pieces, plain, rotated.flip(-1)) is None
    assert find_rotation([], plain, rotated) is None


def test_segments_begin_where_the_cosine_drops() -> None:
    cosines = [0.9, 0.8, 0.3, 0.7, 0.69]
    assert segment_lengths(cosines, 0.7) == [3, 2, 1]
    assert segment_lengths(cosines, 0.0) == [6]
    assert segment_lengths(cosines, 1.0) == [1] * 6
    assert segment_lengths([], 0.7) == [1]
    inside, between = inside_and_between([0.8, 0.9, 0.1, 0.7, 0.2], cosines, 0.7)
    assert (inside, between) == ([0.8, 0.9, 0.7], [0.1, 0.2])


# Rank ------------------------------------------------------------------------------------------


def test_ranks() -> None:
    assert ranks_up_to(256) == [16, 32, 64, 128, 256]
    assert ranks_up_to(48) == [16, 32, 48]
    assert ranks_up_to(16) == [16]


def test_keys_of_a_known_rank() -> None:
    keys = noise(2, 200, 16)  # two heads of 16: a width of 32
    flat = joined(keys)
    assert torch.equal(flat[7], torch.cat([keys[0, 7], keys[1, 7]]))
    low = (noise(200, 5, seed=1) @ noise(5, 32, seed=2)).double()
    energy, basis = spectrum(low)
    assert energy.sum().item() == pytest.approx(1.0)
    assert energy[:5].sum().item() == pytest.approx(1.0)
    assert energy[4].item() > 1e-3
    assert rank_that_holds(energy, 1.0 - 1e-6) == 5
    assert (low @ basis[:, :5] @ basis[:, :5].T - low).abs().max().item() < 1e-5
    singular = torch.linalg.svdvals(flat.double()).square()
    assert (spectrum(flat)[0] - singular / singular.sum()).abs().max().item() < 1e-12


def test_energy_of_orthogonal_directions() -> None:
    keys = torch.zeros(10, 4)
    keys[:8, 2], keys[8:, 0] = 2.0, 2.0  # four fifths and one fifth
    energy, basis = spectrum(keys)
    assert energy.tolist() == pytest.approx([0.8, 0.2, 0.0, 0.0])
    assert basis[2, 0].abs().item() == pytest.approx(1.0)
    assert [rank_that_holds(energy, level) for level in (0.5, 0.8, 0.9)] == [1, 1, 2]


def test_recall_of_low_rank_keys() -> None:
    exact = noise(2, 60, 8)
    queries = [(noise(4, 8, seed=3), 50), (noise(4, 8, seed=4), 60)]

    def recall(rebuilt: Tensor) -> Tensor:
        return recall_of_low_rank(
            queries, exact, rebuilt, counts=(5, 20), scaling=1.0, softcap=None
        )  # fmt: skip

    same = recall(exact)
    assert same.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    opposite = recall(-exact)
    assert opposite[0, 0].item() < 0.2
    # One head without a clue, the other one right: each head's own sets show half.
    half = exact.clone()
    half[0] = -exact[0]
    found = recall(half)
    assert found[0, 0].item() == pytest.approx((1.0 + opposite_of_head(queries, exact)) / 2)


def opposite_of_head(queries: list[tuple[Tensor, int]], exact: Tensor) -> float:
    """Recall of the first head alone with its keys negated."""
    alone = [(query[:2], tokens) for query, tokens in queries]
    found = recall_of_low_rank(
        alone, exact[:1], -exact[:1], counts=(5,), scaling=1.0, softcap=None
    )  # fmt: skip
    return float(found[0, 0])


def test_same_top_counts_heads_apart_and_together() -> None:
    true = torch.tensor([[[0.7, 0.2, 0.1, 0.0], [0.0, 0.1, 0.2, 0.7]]])
    other = torch.tensor([[[0.7, 0.1, 0.2, 0.0], [0.6, 0.4, 0.0, 0.0]]])
    found = same_top(true, other, seen(4), (2,))
    # Head 0 has one of its two, head 1 none; together 0 and 3 are wanted, 0 and 1 found.
    assert found[0, 0].tolist() == [0.25, 0.5]


# Drift -----------------------------------------------------------------------------------------


def test_squared_distances() -> None:
    points = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [9.0, 0.0]]])
    centroids = torch.tensor([[[0.0, 0.0], [10.0, 0.0]]])
    assert squared_distances(points, centroids).tolist() == [[0.0, 25.0, 1.0]]


def test_keys_that_stay_and_keys_that_leave() -> None:
    centres = noise(8, 16, seed=5) * 20
    near = centres[torch.arange(700) % 8] + noise(700, 16, seed=6)
    keys = torch.stack([near, near + 1])
    stay = drift(keys, 600)
    assert stay.shape == (100,)
    assert stay.mean().item() == pytest.approx(1.0, abs=0.15)
    moved = keys.clone()
    moved[:, 650:] += 30.0 * noise(16, seed=7) / noise(16, seed=7).norm()
    found = drift(moved, 600)
    assert found[:50].mean().item() == pytest.approx(stay[:50].mean().item())
    assert found[50:].mean().item() > 5.0


def test_distances_are_in_units_of_held_out_tokens() -> None:
    """One cluster: every distance is from the mean, so that the ratio is known."""
    apart = held_out(16, seed=0)
    assert apart.sum().item() == 2
    # All that is clustered is at 0 or 2, what is held out at 3: two away from the mean.
    prompt = torch.full((16,), 3.0)
    prompt[~apart] = torch.tensor([0.0, 2.0]).repeat(7)
    keys = torch.cat([prompt, torch.tensor([1.0, 5.0])]).view(1, 18, 1)
    assert drift(keys, 16).tolist() == pytest.approx([0.0, 4.0])
    assert [held_out(n, 0).sum().item() for n in (2, 7, 8, 80)] == [1, 1, 1, 10]


# Means -----------------------------------------------------------------------------------------


def test_series_count_live_rows_and_what_is_said() -> None:
    series = Series()
    nan = math.nan
    series.add(torch.tensor([True, True]), [{"a": torch.tensor([[nan], [nan]])}])
    series.add(torch.tensor([True, True]), [{"a": torch.tensor([[1.0], [3.0]])}])
    series.add(torch.tensor([True, False]), [{"a": torch.tensor([[5.0], [99.0]])}])
    assert series.means("a") == [[3.0]]
    assert series.of_row("a", 0, 0) == [1.0, 5.0]
    assert series.of_row("a", 0, 1) == [3.0]
    empty = Series()
    empty.add(torch.tensor([True]), [{"a": torch.tensor([[nan, 2.0]])}])
    assert empty.means("a") == [[None, 2.0]]
