"""Draws: the right distribution, the same token in any batch, never an impossible one."""

from typing import Any

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.search.draws import candidate_uniforms, make_choose


def random_logits(rows: int, vocabulary: int = 300) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))


def allowed_by_transformers(logits: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Probabilities after transformers' own warpers."""
    from transformers.generation import logits_process as warpers

    ids = torch.zeros(1, 1, dtype=torch.int64)
    logits = warpers.TemperatureLogitsWarper(settings["temperature"])(ids, logits)
    if settings.get("top_k"):
        logits = warpers.TopKLogitsWarper(settings["top_k"])(ids, logits)
    if settings.get("top_p", 1.0) < 1:
        logits = warpers.TopPLogitsWarper(settings["top_p"])(ids, logits)
    return logits.softmax(dim=-1)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.6},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers(settings: dict[str, Any]) -> None:
    logits = random_logits(1)
    expected = allowed_by_transformers(logits.double(), settings)[0]
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    tokens, _ = make_choose(**settings)(logits.expand(10_000, -1), uniforms)
    found = torch.bincount(tokens, minlength=300) / 10_000
    # A grid of uniforms hits every interval of the CDF to within two of its own spacings.
    assert (found - expected).abs().max() <= 2 / 10_000
    assert (found[expected == 0] == 0).all()


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(6)
    uniforms = torch.rand(6, dtype=torch.float64)
    tokens, log_probabilities = make_choose(0.3, 5, 0.9)(logits, uniforms)
    assert log_probabilities.dtype == torch.float32
    assert torch.equal(log_probabilities, logits.log_softmax(-1)[torch.arange(6), tokens])


def test_zero_temperature_is_argmax() -> None:
    logits = random_logits(4)
    tokens, _ = make_choose(0)(logits, torch.rand(4, dtype=torch.float64))
    assert torch.equal(tokens, logits.argmax(-1))
    sharp, _ = make_choose(1e-6)(logits, torch.full((4,), 0.999, dtype=torch.float64))
    assert torch.equal(sharp, tokens)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("settings", [(1.0, 0, 1.0), (1.0, 3, 1.0), (2.0, 0, 0.01)])
def test_an_impossible_token_is_never_drawn(
    uniform: float, settings: tuple[float, int, float]
) -> None:
    """At the borders of [0, 1) too, where the first and the last token are impossible."""
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 4:6] = torch.tensor([1.0, 1.0])
    tokens, _ = make_choose(*settings)(logits, torch.tensor([uniform], dtype=torch.float64))
    assert 4 <= int(tokens) <= 5
    large = torch.zeros(1, 200_000)
    large[0, -1] = -torch.inf
    tokens, _ = make_choose(*settings)(large, torch.tensor([uniform], dtype=torch.float64))
    assert int(tokens) != 199_999


def test_a_rows_token_does_not_depend_on_the_batch() -> None:
    logits, uniforms = random_logits(64), torch.rand(64, dtype=torch.float64)
    choose = make_choose(0.8, 50, 0.95)
    together, sums = choose(logits, uniforms)
    for rows in (1, 3, 16):
        parts = [
            choose(logits[at : at + rows], uniforms[at : at + rows]) for at in range(0, 64, rows)
        ]
        assert torch.equal(torch.cat([tokens for tokens, _ in parts]), together)
        assert torch.equal(torch.cat([numbers for _, numbers in parts]), sums)


def test_uniforms_depend_on_seed_step_candidate_and_place_alone() -> None:
    whole = candidate_uniforms(7, 3, 16, 32)
    assert whole.dtype == torch.float64
    assert ((whole >= 0) & (whole < 1)).all()
    assert torch.equal(candidate_uniforms(7, 3, 5, 9), whole[:5, :9])
    others = [candidate_uniforms(8, 3, 16, 32), candidate_uniforms(7, 2, 16, 32)]
    numbers = torch.cat([whole.flatten(), *(other.flatten() for other in others)])
    assert len(set(numbers.tolist())) == len(numbers)
    assert abs(float(numbers.mean()) - 0.5) < 0.03
    assert candidate_uniforms(2**64 - 1, 0, 1, 1).shape == (1, 1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ((-1.0, 0, 1.0), "temperature=-1.0"),
        ((1e-9, 0, 1.0), "temperature=1e-09"),
        ((float("nan"), 0, 1.0), "temperature=nan"),
        ((1.0, -1, 1.0), "top_k=-1"),
        ((1.0, 0, 0.0), "top_p=0.0"),
        ((1.0, 0, 1.5), "top_p=1.5"),
    ],
)
def test_refusals(settings: tuple[float, int, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_choose(*settings)
