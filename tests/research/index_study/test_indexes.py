"""The study of indexes: what it calls the truth, its plain forms, and the program."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.evaluate.result import Result
from penstock.kernels.key_rotation import KeyRotation
from research.figures.report import charts_of
from research.index_study.bases import by_covariance, by_scale, fit, joint
from research.index_study.codes import eight_bits, four_bits, in_columns
from research.index_study.indexes import Indexes
from research.index_study.layer import GROUP_TOKENS, Layer
from research.index_study.program import _taken, mean_of, run

TOKENS, HEADS, KV_HEADS, DIM = 1024, 4, 2, 32


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None].float() * 0.5 ** torch.arange(DIM // 2)
    both = torch.cat([angles, angles], dim=1)
    return both.cos(), both.sin()


def turned(x: Tensor, places: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    cos, sin = rotary(places)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    """Two texts whose keys have six components before they are turned, and queries like them."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, KV_HEADS * DIM, generator=generator)
    made = []
    for _ in range(2):
        plain = torch.randn(TOKENS, 6, generator=generator) @ mixing
        keys = plain.view(TOKENS, KV_HEADS, DIM).transpose(0, 1)
        queries = torch.randn(HEADS, 64, DIM, generator=generator)
        places = torch.linspace(256, TOKENS + 7, 64).long()
        queries = turned(queries, places)
        made.append(
            Layer(
                keys=turned(keys, torch.arange(TOKENS)), asked=queries[:, -8:],
                kept=queries[:, :-8], places=places[:-8], scaling=0.3, rotary=rotary,
                rotation=KeyRotation(0.5 ** torch.arange(DIM // 2, dtype=torch.float64)),
            )
        )  # fmt: skip
    return made


def test_keys_turn_back_and_on(layers: list[Layer]) -> None:
    """Before RoPE these keys have six components; by blocks more, and after RoPE most."""
    layer, needed = layers[0], []
    for block in (1, 16, 0):
        back = layer.turned_back(block)
        torch.testing.assert_close(layer.turned_on(back, block), layer.keys, rtol=0, atol=1e-4)
        energy = torch.linalg.svdvals(joint(back)).square()
        needed.append(int((energy.cumsum(0) < 0.999 * energy.sum()).sum()) + 1)
    assert needed[0] <= 6 < needed[1] < needed[2]


def test_the_truth_is_full_attention(layers: list[Layer]) -> None:
    layer = layers[0]
    truth = layer.truth()
    query, keys = layer.asked[3, 0], layer.keys[1]
    shares = torch.softmax(keys @ query * 0.3, 0)
    alone = Layer(
        keys=keys[None], asked=query[None, None], kept=layer.kept[:1], places=layer.places,
        scaling=0.3, rotary=rotary,
    ).truth()  # fmt: skip
    live = shares[4:-64].view(-1, GROUP_TOKENS).sum(-1)
    torch.testing.assert_close(alone.groups[0], live)
    assert alone.outside == pytest.approx(float(live.sum()), rel=1e-4)
    assert truth.captured(truth.groups) == max(
        truth.captured(scores) for scores in (truth.groups, -truth.groups, truth.groups.square())
    )
    assert truth.captured(-truth.groups) < 0.1 < truth.captured(truth.groups)


def test_all_components_are_the_keys(layers: list[Layer]) -> None:
    """Whatever components are chosen for, and whatever blocks they are of."""
    layer = layers[0]
    for block, weight in ((0, None), (64, by_scale(layer)), (64, by_covariance(layer, 64))):
        basis = fit(layer, block, weight=weight, centred=block == 64)
        codes = (joint(layer.turned_back(block)) - basis.mean) @ basis.encoder
        rebuilt = codes @ basis.decoder.T + basis.mean
        torch.testing.assert_close(rebuilt, joint(layer.turned_back(block)), rtol=0, atol=2e-3)


def test_components_that_queries_see_come_first() -> None:
    """A loud component that no query has is left to the end."""
    generator = torch.Generator().manual_seed(1)
    keys, queries = torch.randn(1, TOKENS, DIM, generator=generator), torch.randn(2, 64, DIM)
    keys[..., 0] *= 20
    queries[..., [0, DIM // 2]] = 0.0
    layer = Layer(
        keys=keys, asked=queries, kept=queries, places=torch.arange(64), scaling=0.3, rotary=rotary
    )
    first = fit(layer, 0).encoder[:, 0].abs()
    assert first.argmax() == 0
    seen = fit(layer, 0, weight=by_scale(layer, floor=1e-6))
    assert seen.encoder[0, :8].abs().max() < 1e-2


def test_bits_keep_what_they_can() -> None:
    components = torch.randn(512, 15, generator=torch.Generator().manual_seed(0))
    errors = [
        (components - quantise(components)).abs().amax(0) / components.abs().amax(0)
        for quantise in (eight_bits, four_bits, in_columns(16))
    ]
    assert float(errors[0].max()) <= 0.5 / 127 + 1e-6
    assert float(errors[1].max()) <= 0.5 / 7.5 + 1e-6
    assert torch.equal(errors[2][1:], errors[1][1:])
    assert torch.equal(errors[2][:1], errors[0][:1])


def test_every_index_finds_no_more_than_there_is(layers: list[Layer]) -> None:
    layer, other = layers
    truth = layer.truth()
    most, found = truth.captured(truth.groups), {}
    for index in Indexes(layer, truth, other):
        assert index.name not in found
        scores = index.scores()
        assert scores.shape == truth.groups.shape
        assert bool(scores.isfinite().all())
        found[index.name] = truth.captured(scores)
    assert max(found.values()) <= most + 1e-6
    # Six components before RoPE: eight of them are all, and more than those after RoPE can be.
    assert found["keys before RoPE, 8 B"] > 0.98 * most
    assert found["keys before RoPE, 8 B"] > found["keys after RoPE, 8 B"] + 0.05
    assert found["chosen, 32 B"] > found["chosen, 8 B"]
    # The product's own class is the plain form, fitted to a sample.
    for rank in (16, 64):
        plain = found[f"keys after RoPE, {rank} B"]
        assert found[f"product, keys after RoPE, {rank} B"] == pytest.approx(plain, abs=0.03)
    for size in (8, 16, 32):
        plain = found[f"chosen, {size} B"]
        assert found[f"product, by blocks, {size} B"] == pytest.approx(plain, abs=0.03)


def test_columns_go_where_they_find_most() -> None:
    found = [[0.1, 0.5], [0.4, 0.6], [0.5, 0.61]]
    assert _taken(found, 1) == [1, 1]
    assert _taken(found, 2) == [3, 1]
    assert _taken(found, 3) == [3, 3]


def test_the_program(shallow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two texts of a model, the tables of both, and the figure."""
    for name in ("one", "two"):
        words = [f"{name}{number % 97}" for number in range(2500)]
        (tmp_path / name).write_text(" ".join(words))
    out = tmp_path / "study.json"
    texts = [f"--text={name}={tmp_path / name}" for name in ("one", "two")]
    run([str(shallow), *texts, "--tokens", "1024", "--every", "4", "--output", str(out)])
    shown = capsys.readouterr().out
    result = Result.load(out)
    assert str(tmp_path) not in out.read_text()
    (model,) = result.figures["models"]
    assert model["tokens"] == 1024
    assert len(model["layers"]) == 1
    assert [text["text"] for text in model["texts"]] == ["one", "two"]
    for text in model["texts"]:
        rows = {(row["family"], row["size"]): row for row in text["rows"]}
        assert len(rows) == len(text["rows"])
        assert all(len(row["layers"]) == 1 for row in text["rows"])
        assert mean_of(rows["oracle", None]) >= mean_of(rows["chosen", 16])
        assert ("columns divided by layer", 16) in rows
        assert f"{mean_of(rows['oracle', None]):.3f}" in shown
    assert charts_of(result, "study")
