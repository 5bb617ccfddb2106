"""Step scorers: their ratings, where they come from, and what is said about bad ones."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import penstock.models
from penstock.core.errors import ConfigError, ModelLoadError, PenstockError, VerifierError
from penstock.models.reward_model import RewardModelScorer
from penstock.search.step_scorer import (
    CallableScorer,
    Candidate,
    LogProbabilityScorer,
    as_scorer,
    checked_scores,
    load_scorer,
)

RECALL = Path(penstock.models.__file__).parent / "recall"


def candidate(text: str = "x", log_probability: float = -1.0, tokens: int = 2) -> Candidate:
    return Candidate(
        prompt="The sky", prompt_token_ids=[1, 2], text=text, token_ids=[3] * tokens,
        log_probability=log_probability, is_finished=False,
    )  # fmt: skip


CANDIDATES = [candidate(" is blue"), candidate(" is green"), candidate(" is a very long red")]


def test_log_probability_is_a_mean_by_default() -> None:
    candidates = [candidate("", -3.0, 6), candidate("", -2.0, 2)]
    assert LogProbabilityScorer().score(candidates) == [-0.5, -1.0]
    assert LogProbabilityScorer(0).score(candidates) == [-3.0, -2.0]
    assert LogProbabilityScorer(2).score(candidates) == pytest.approx([-3 / 36, -0.5])
    assert load_scorer("logprob", length_penalty=0).score(candidates) == [-3.0, -2.0]
    with pytest.raises(ConfigError, match="length_penalty=nan"):
        LogProbabilityScorer(math.nan)


def test_a_function_gets_the_texts_and_the_prompt_if_it_asks() -> None:
    def by_length(texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    def with_prompt(prompt: str, texts: list[str], extra: int = 0) -> list[int]:
        return [len(prompt + text) + extra for text in texts]

    assert CallableScorer(by_length).score(CANDIDATES) == [8, 9, 19]
    assert CallableScorer(with_prompt).score(CANDIDATES) == [15, 16, 26]
    assert as_scorer(by_length).name == "by_length"
    assert as_scorer("logprob").name == "logprob"
    scorer = LogProbabilityScorer()
    assert as_scorer(scorer) is scorer
    with pytest.raises(ConfigError, match="3 is not callable"):
        as_scorer(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.5, -math.inf],
        (True, False, True),
        np.array([1.0, 2.0, 3.0], dtype=np.float32),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
        [torch.tensor(1.0), np.float64(2), 3],
        torch.ones(3, requires_grad=True),
    ],
    ids=["list", "bools", "numpy", "torch", "mixed", "gradient"],
)
def test_numbers_of_any_kind_will_do(returned: Any) -> None:
    scores = checked_scores(CallableScorer(lambda texts: returned), CANDIDATES)
    values = returned.detach() if isinstance(returned, torch.Tensor) else returned
    assert scores == [float(value) for value in values]
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1, math.nan, 3], "returned nan for text 1; a score is a number"),
        ([1, 2, math.inf], "returned inf for text 2"),
        ([1, "2", 3], "returned '2' for text 1"),
        ([None, 2, 3], "returned None for text 0"),
        ([[1, 2], 2, 3], r"returned \[1, 2\] for text 0"),
        ([1j, 2, 3], "returned 1j for text 0"),
        ([1, 10**400, 3], r"returned 10+\.\.\. for text 1"),
        (torch.zeros(3, 2), r"returned tensor\(\[0., 0.\]\) for text 0"),
        ([1, 2], "returned 2 scores for 3 texts"),
        (torch.tensor([1.0] * 4), "returned 4 scores for 3 texts"),
        ("abc", "returned str instead of a list of 3 numbers"),
        (None, "returned NoneType instead of a list of 3 numbers"),
        (0.5, "returned float instead"),
        (torch.tensor(0.5), "returned Tensor instead of a list"),
        (np.array(0.5), "returned ndarray instead of a list"),
    ],
)
def test_what_is_no_rating_is_refused(returned: Any, said: str) -> None:
    with pytest.raises(VerifierError, match=said) as caught:
        checked_scores(CallableScorer(lambda texts: returned, "mine:rate"), CANDIDATES)
    assert str(caught.value).startswith("scorer mine:rate returned")
    assert "\n" not in str(caught.value)


def test_what_a_scorer_raises_is_named_in_one_line() -> None:
    def fail(texts: Sequence[str]) -> list[float]:
        raise KeyError("no such\nhop")

    with pytest.raises(VerifierError, match=r"^scorer fail raised KeyError: ") as caught:
        checked_scores(CallableScorer(fail), CANDIDATES)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)

    def fail_later(texts: Sequence[str]) -> Iterator[float]:
        yield from fail(texts)

    with pytest.raises(VerifierError, match=r"^scorer fail_later raised KeyError: "):
        checked_scores(CallableScorer(fail_later), CANDIDATES)

    def interrupt(texts: Sequence[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked_scores(CallableScorer(interrupt), CANDIDATES)


def test_a_scorer_that_has_no_name_and_takes_none() -> None:
    @dataclass(frozen=True)
    class Frozen:
        def score(self, candidates: Sequence[Candidate]) -> list[float]:
            return [0.0] * len(candidates)

    scorer: Any = Frozen()
    with pytest.raises(ConfigError, match="Frozen has no name"):
        as_scorer(scorer)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with scorers in it, good and bad."""
    (tmp_path / "my_scorers.py").write_text(
        "def rate(texts):\n    return [len(text) for text in texts]\n"
        "class Judge:\n"
        "    def score(self, candidates):\n"
        "        return [one.num_tokens for one in candidates]\n"
        "    def shout(self, prompt, texts):\n        return [prompt.isupper() for _ in texts]\n"
        "judge = Judge()\n"
        "number = 7\n"
    )
    (tmp_path / "broken_scorers.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "failing_scorers.py").write_text("raise RuntimeError('a\\nb')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "my_scorers"


def test_scorers_by_name(module: str) -> None:
    rate = load_scorer(f"{module}:rate")
    assert rate.name == "my_scorers:rate"
    assert rate.score(CANDIDATES) == [8, 9, 19]
    judge = load_scorer(f"{module}:judge")
    assert judge.name == "my_scorers:judge"
    assert judge.score(CANDIDATES) == [2, 2, 2]
    assert load_scorer(f"{module}:judge.shout").score(CANDIDATES) == [False] * 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "no_such",
            "there is no scorer 'no_such'; write logprob, module:function, FILE.py:",
        ),
        ("my_scorers:", "there is no scorer 'my_scorers:'"),
        ("no_such:rate", "module no_such was not found"),
        ("my_scorers.more:rate", "module my_scorers.more was not found"),
        ("my_scorers:none", "module my_scorers has no none"),
        ("my_scorers:judge.none", "module my_scorers has no judge.none"),
        ("my_scorers:number", "number is int, which cannot be called"),
        ("broken_scorers:rate", "needs no_such_module_anywhere, which is not installed"),
        ("failing_scorers:rate", "importing failing_scorers raised RuntimeError: a b"),
    ],
)
def test_names_that_lead_nowhere(module: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_scorer(name)


def save_reward_model(folder: Path, **settings: Any) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 1472, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "num_labels": 1, "pad_token_id": 0,
    }  # fmt: skip
    model = LlamaForSequenceClassification(LlamaConfig(**{**sizes, **settings})).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(RECALL).save_pretrained(folder)
    return model


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("pad_token_id", [0, None])
def test_a_reward_model_rates_each_text(
    tmp_path: Path, labels: int, pad_token_id: int | None
) -> None:
    model = save_reward_model(tmp_path, num_labels=labels, pad_token_id=pad_token_id)
    scorer = load_scorer(f"reward:{tmp_path}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for one in CANDIDATES:
        ids = torch.tensor([tokenizer(one.prompt + one.text)["input_ids"]])
        logits = model(input_ids=ids).logits[0].detach()
        expected.append(float(logits[0] if labels == 1 else logits[1] - logits[0]))
    assert scorer.score(CANDIDATES) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) > 1
    assert RewardModelScorer(tmp_path, batch_size=2).score(CANDIDATES) == pytest.approx(
        expected, abs=1e-5
    )
    assert scorer.name == f"reward:{tmp_path}"


def test_reward_models_that_cannot_rate(tmp_path: Path) -> None:
    def refused(folder: Path, kind: type[PenstockError], said: str) -> None:
        with pytest.raises(kind, match=said) as caught:
            load_scorer(f"reward:{folder}")
        assert "\n" not in str(caught.value)

    refused(tmp_path / "none", ModelLoadError, "there is no config.json in")
    refused(RECALL, ModelLoadError, r"is no trained reward model: 1 of its tensors .*score\.weight")
    save_reward_model(tmp_path / "five", num_labels=5)
    refused(tmp_path / "five", ConfigError, "sorts texts into 5 classes")
    save_reward_model(tmp_path / "one")
    scorer = load_scorer(f"reward:{tmp_path / 'one'}")
    with pytest.raises(VerifierError, match=r"a text of 1.. tokens: it has 64 positions"):
        checked_scores(scorer, [candidate(" is blue" * 60)])
    (tmp_path / "one" / "config.json").write_text("{}")
    refused(tmp_path / "one", ModelLoadError, "reward:")
