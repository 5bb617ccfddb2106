"""Replays of recorded keys: what is chosen, split, read, moved and found, against plain counts."""

import numpy as np
import pytest
import torch

from research.clusters.layouts import LAYOUTS, StoredHead, run_layouts
from research.clusters.recording import KeyStream
from research.clusters.replay import (
    Settings,
    attention_found,
    choose,
    fitted_clusters,
    global_method,
    replay,
    run_method,
)
from research.clusters.run import mean_length

PROMPT, OUTPUT, DIM = 96, 200, 8
SETTINGS = Settings(cluster_tokens=12, top=0.15)


@pytest.fixture(scope="module")
def stream() -> KeyStream:
    """Two layers of two heads whose output wanders off; queries look for keys like them."""
    draw = torch.Generator().manual_seed(0)
    tokens = PROMPT + OUTPUT
    away = torch.zeros(tokens)
    away[PROMPT:] = torch.linspace(0, 6, OUTPUT)
    keys = [torch.randn(2, tokens, DIM, generator=draw) + away[:, None] for _ in range(2)]
    queries = [torch.randn(4, tokens, DIM, generator=draw) * 2 for _ in range(2)]
    return KeyStream(
        prompt_tokens=PROMPT, keys=keys, queries=queries, scaling=[DIM**-0.5] * 2, layers=(0, 1),
        expected=1.0,
    )  # fmt: skip


def test_the_best_clusters_are_chosen_until_the_share_is_reached() -> None:
    centroids = torch.tensor([[[4.0], [3.0], [2.0], [9.0], [1.0]]])
    counts = np.array([[2, 5, 30, 0, 3]])
    query = torch.ones(1, 1, 1)
    chosen = choose(query, centroids, counts, 0.1, 1.0)  # 4 of 40
    assert chosen.tolist() == [[True, True, False, False, False]]
    assert choose(query, centroids, counts, 0.05, 1.0).tolist()[0][:3] == [True, False, False]
    assert choose(query, centroids, counts, 1.0, 1.0).tolist() == [[True, True, True, False, True]]


def test_updates_with_no_step_behind_them_are_no_misses(stream: KeyStream) -> None:
    figures, _ = run_method(stream, Settings(cluster_tokens=12, top=1.0), "static", 16, looks=False)
    assert figures["again"] == [1.0] * 5, "every step retrieves everything"


def test_a_replay_takes_every_entry_and_splits_what_it_read(stream: KeyStream) -> None:
    clusters = fitted_clusters(stream, 0, SETTINGS, "adaptive", 3)
    loaded, splits = 0, 0
    for number, step in enumerate(replay(clusters, stream, 0, SETTINGS, look_every=5)):
        assert (step.number, step.position) == (number, PROMPT + number)
        assert step.counts.sum(axis=1).tolist() == [PROMPT + number] * 2
        assert (step.attended is not None) == (number % 5 == 0)
        if step.attended is not None:
            attended = step.attended.sum(axis=1)
            assert attended.tolist() == (step.counts * step.chosen).sum(axis=1).tolist()
            assert (attended >= 0.15 * step.position).all()
        assert clusters.entries.num_buffered <= 3
        assert len(step.positions) == len(step.adaptation.splits)
        for row, cluster in step.adaptation.loaded:
            assert not step.chosen[row, cluster]
        assert (step.loaded_entries > 0) == bool(step.adaptation.loaded)
        loaded += step.loaded_entries
        splits += len(step.adaptation.splits)
    assert clusters.length == PROMPT + OUTPUT
    assert loaded > 0
    assert splits >= clusters.num_splits > 20


def test_waiting_entries_save_loads(stream: KeyStream) -> None:
    rows = [run_method(stream, SETTINGS, "adaptive", buffer, looks=False)[0] for buffer in (0, 2)]
    assert 0 < rows[1]["split_loads_entries"] < rows[0]["split_loads_entries"]
    assert rows[1]["loads"] < rows[0]["loads"]
    assert "mass" not in rows[0]


def test_methods_differ_as_the_paper_says(stream: KeyStream) -> None:
    figures = {}
    for update in ("static", "local", "adaptive"):
        figures[update], partitions = run_method(stream, SETTINGS, update, 16)
        assert [part.shape for part in partitions] == [(2, PROMPT + OUTPUT)] * 2
    assert figures["static"]["clusters"] == 8
    assert figures["static"]["splits"] == figures["static"]["split_loads_entries"] == 0
    assert figures["adaptive"]["by_key"] < figures["static"]["by_key"]
    assert figures["adaptive"]["mass"] > figures["static"]["mass"]
    for one in figures.values():
        assert one["best"] == figures["static"]["best"] >= one["recall"] * 0.5
        assert one["again"] == sorted(one["again"])
        assert one["fetched_entries"] <= one["retrieved_entries"]
    counts = [round(x) for x in figures["adaptive"]["clusters_of_layer"]]
    assert global_method(stream, SETTINGS, counts)["by_key"] < figures["static"]["by_key"]


def test_attention_found_is_that_of_full_attention(stream: KeyStream) -> None:
    clusters = fitted_clusters(stream, 1, SETTINGS, "static", 16)
    step = next(iter(replay(clusters, stream, 1, SETTINGS, look_every=1)))
    assert step.attended is not None
    found = attention_found(stream, 1, step, 0.15)
    mass = 0.0
    for head in range(4):
        logits = stream.keys[1][head // 2, :PROMPT] @ stream.queries[1][head, PROMPT] * DIM**-0.5
        mass += float(logits.softmax(dim=0)[torch.from_numpy(step.attended[head // 2])].sum()) / 4
    assert found["mass"] == pytest.approx(mass, abs=1e-6)
    assert found["mass"] <= 1.0
    assert found["read"] == pytest.approx(step.attended.mean())
    assert found["best"] > 0.15


def test_layouts_hold_the_clusters(stream: KeyStream) -> None:
    """Whatever the layout, a cluster's bytes are those of its members at every step."""
    clusters = fitted_clusters(stream, 0, SETTINGS, "adaptive", 4)
    members = {cluster: clusters.members(1, cluster) for cluster in range(8)}
    files = [StoredHead(name, 32, PROMPT + OUTPUT) for name in LAYOUTS]
    for file in files:
        file.place(list(range(8)), members)
    for step in replay(clusters, stream, 0, SETTINGS):
        for file in files:
            file.take(step, 1)
        if step.number % 40 == 39:
            for file in files:
                for cluster in file.file.clusters():
                    [entries] = file.file.read([cluster])  # each begins with its position
                    stored = np.ascontiguousarray(entries[:, :8]).view(np.int64).ravel().tolist()
                    assert stored == file.positions[cluster].tolist()
                    assert sorted(stored) == clusters.members(1, cluster).tolist()


def test_what_layouts_cost(stream: KeyStream) -> None:
    seen: list[int] = []
    costs = run_layouts(stream, 0, SETTINGS, entry_bytes=32, on_step=seen.append)
    assert seen == list(range(1, OUTPUT + 1))
    assert tuple(costs) == LAYOUTS
    means = {name: mean_length(cost.access_lengths) for name, cost in costs.items()}
    assert 1.0 <= means["sequence"] < means["intra"] < means["packed"]
    assert costs["sequence"].moved_bytes == 0
    assert costs["packed"].moved_bytes > 20 * costs["inter"].moved_bytes > 0
    for cost in costs.values():
        assert cost.used_bytes <= cost.end_bytes
        assert cost.used_bytes == 2 * PROMPT * 32 + cost.appended_bytes
        assert sum(cost.early_lengths.values()) < sum(cost.access_lengths.values())
    assert means["gaps"] > means["inter"]
    assert costs["gaps"].gap_bytes > costs["inter"].gap_bytes == 0
    asked = costs["gaps"].read_bytes - costs["gaps"].gap_bytes
    assert asked == costs["inter"].read_bytes == costs["packed"].read_bytes
    assert costs["packed"].end_bytes == costs["packed"].used_bytes
