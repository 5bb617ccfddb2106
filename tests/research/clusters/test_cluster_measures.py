"""Drift, planes and tightness on keys whose answers are known."""

import numpy as np
import pytest
import torch

from research.clusters.layouts import chosen_heads, numbers, picture
from research.clusters.replay import global_labels, measure_drift, tightness


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_keys_like_the_prompts_do_not_drift() -> None:
    keys = noise(2, 2000, 8)
    found = measure_drift(keys, 1200, cluster_tokens=16, seed=0)
    assert found.outside.shape == (2, 8)
    calm = found.outside_prompt[:, None]
    assert (found.outside - calm).abs().max().item() < 0.12
    assert (found.distance - 1).abs().max().item() < 0.25
    assert found.shift.max().item() < 0.2


def test_keys_that_wander_off() -> None:
    keys = noise(1, 1600, 8)
    keys[:, 800:] += torch.linspace(0, 30, 800)[:, None]
    found = measure_drift(keys, 800, cluster_tokens=16, seed=0)
    shift = found.shift[0].tolist()
    assert shift == sorted(shift)
    # The mean of the last part is 28.1 away in all 8 directions; a key of the prompt sqrt(8).
    assert shift[-1] == pytest.approx(28.1, rel=0.05)
    assert found.outside[0, -1] == 1.0
    assert found.outside[0, 0] > found.outside_prompt[0]
    assert found.distance[0, -1] > 50


def test_tightness_is_the_variance_about_the_means() -> None:
    keys = torch.tensor([[0.0, 0.0], [2.0, 0.0], [5.0, 5.0], [5.0, 5.0], [5.0, 8.0]])
    found = tightness(keys, torch.tensor([7, 7, 3, 3, 3]))
    assert found.by_key == pytest.approx((1 + 1 + 1 + 1 + 4) / 5)
    assert found.by_cluster == pytest.approx((1 + 2) / 2)
    assert (found.clusters, found.largest) == (2, 3)


def test_all_keys_at_once_are_tighter_than_chance() -> None:
    keys = noise(300, 4)
    drawn = torch.randint(0, 20, (300,), generator=torch.Generator().manual_seed(1))
    best = tightness(keys, global_labels(keys, 20, seed=0))
    assert best.by_key < 0.5 * tightness(keys, drawn).by_key
    assert best.clusters <= 20


def test_a_picture_keeps_places_and_clusters() -> None:
    keys = noise(500, 6) * torch.tensor([20.0, 10.0, 0.1, 0.1, 0.1, 0.1])
    before = torch.arange(500) % 3
    after = before.clone()
    after[400:] = 9
    found = picture(keys, 300, before=before, after=after, name="one")
    assert found["variance_shown"] > 0.99
    x, y = numbers(found["x"]), numbers(found["y"])
    assert len(x) == len(numbers(found["token"])) == 500
    for drawn, column in ((x, keys[:, 0]), (y, keys[:, 1])):
        assert abs(np.corrcoef(drawn, column.numpy())[0, 1]) > 0.999
    assert max(abs(x).max(), abs(y).max()) == 1000
    assert numbers(found["before"]["cluster"]).tolist() == before.tolist()
    # The prompt's clusters have the centres of their prompt's keys; later ones of all their keys.
    assert found["before"]["first_token"] == "0 1 2"
    assert found["after"]["first_token"] == "0 1 2 400"
    centre = x[:300][before[:300] == 1].mean()
    assert numbers(found["before"]["x"])[1] == pytest.approx(centre, abs=2)
    assert numbers(found["after"]["x"])[3] == pytest.approx(x[400:].mean(), abs=2)


def test_heads_are_chosen_by_drift() -> None:
    late = torch.tensor([[0.1, 0.5], [0.9, 0.4], [0.3, 0.2]])
    assert chosen_heads(late) == [(1, 1), (1, 0)]
    assert chosen_heads(torch.tensor([[0.5]])) == [(0, 0)]
