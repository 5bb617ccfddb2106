"""Key streams: against transformers' own cache, and the texts that they are made of."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.tasks.documents import count_tokens
from penstock.evaluate.tasks.words import Words
from penstock.generation.prompts import make_batch
from penstock.models.loader import LoadedModel, load
from penstock.testing.tiny_models import tiny_model
from research.clusters.recording import answer_of, generated, read_on, record_keys, ring_walk
from research.statistics.capture import full_attention_steps


@pytest.fixture(scope="module")
def recall() -> LoadedModel:
    return load(dtype="float32")  # no two of its tokens are near a tie


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_chunks_leave_the_keys_and_queries_of_single_steps(family: str) -> None:
    loaded = LoadedModel(model=tiny_model(family), tokenizer=None, name=family)
    ids = torch.randint(1, 90, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    stream = record_keys(loaded, ids, 50, chunk=7)
    batch = make_batch(loaded, [ids[:50]], new_tokens=10, pad_token_id=0)
    steps = full_attention_steps(
        loaded, batch, new_tokens=10, chunk=50, ends=frozenset(),
        following=torch.tensor([ids[50:]]),
    )  # fmt: skip
    for step in steps:
        for number, layer in enumerate(step.layers):
            seen = 50 + step.number + 1
            assert (stream.keys[number][:, :seen] - layer.keys[0]).abs().max().item() < 1e-4
            query = stream.queries[number][:, seen - 1]
            assert (query - layer.query[0]).abs().max().item() < 1e-4
    assert (stream.prompt_tokens, stream.output_tokens) == (50, 10)
    heads, each = stream.keys[0].shape[0], stream.queries[0].shape[0] // stream.keys[0].shape[0]
    grouped = stream.grouped_queries(0)
    assert grouped.shape[:2] == (heads, each)
    assert torch.equal(grouped[-1, 0], stream.queries[0][(heads - 1) * each])


def test_what_does_not_fit_is_refused(recall: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no prompt of 5"):
        record_keys(recall, [1] * 5, 5, chunk=4)
    with pytest.raises(PromptError, match="shorter --max-new-tokens"):
        record_keys(recall, [1] * 50_000, 5, chunk=4)
    path = tmp_path / "text.txt"
    path.write_text("the sky is blue . " * 10)
    assert len(read_on(recall, path, prompt_tokens=20, output_tokens=10)) == 30
    with pytest.raises(PromptError, match="give a longer one"):
        read_on(recall, path, prompt_tokens=100, output_tokens=10)


def test_walkers_go_round_and_round(recall: LoadedModel) -> None:
    assert recall.tokenizer is not None
    words = Words.of(recall.tokenizer)
    prompt, answer = ring_walk(400, 900, random.Random(0), words)
    assert 390 <= count_tokens(prompt) + 1 <= 400
    assert 900 <= count_tokens(answer) < 920
    body = prompt.partition("later . ")[2].partition(" Question")[0]
    rules: dict[str, str] = {}
    for rule in body.removesuffix(" ;").split(" ; "):
        here, there = rule.split(" > ")
        rules[here] = there
    said: dict[str, list[str]] = {"red": [], "blue": []}
    for step in answer.removesuffix(" ;").split(" ; "):
        name, hop = step.split(" : ")
        here, there = hop.split(" > ")
        assert rules[here] == there
        assert not said[name] or said[name][-1] == here
        said[name].append(there)
    for name, places in said.items():
        assert len(set(places)) == 16 < len(places), name
    with pytest.raises(ConfigError, match="too short"):
        ring_walk(40, 10, random.Random(0), words)


def test_the_bundled_model_walks_rings(recall: LoadedModel) -> None:
    ids, prompt = answer_of(recall, "ring_walk", prompt_tokens=500, output_tokens=300, seed=1)
    assert len(ids) == prompt + 300
    assert record_keys(recall, ids, prompt, chunk=256).expected > 0.9
    other, _ = answer_of(recall, "ring_walk", prompt_tokens=500, output_tokens=300, seed=2)
    assert other != ids


def test_tasks_that_end(recall: LoadedModel) -> None:
    ids, prompt = answer_of(recall, "long_walk", prompt_tokens=512, output_tokens=100, seed=0)
    assert len(ids) == prompt + 100
    ids, prompt = answer_of(recall, "single_noise", prompt_tokens=128, output_tokens=100, seed=0)
    assert 0 < len(ids) - prompt < 30
    with pytest.raises(ConfigError, match="no task is called"):
        answer_of(recall, "flying", prompt_tokens=512, output_tokens=100, seed=0)


def test_generated_output_is_the_likeliest(recall: LoadedModel) -> None:
    prompt, _ = answer_of(recall, "ring_walk", prompt_tokens=200, output_tokens=8, seed=0)
    counted: list[int] = []
    ids = generated(recall, prompt, 12, on_token=counted.append)
    assert counted == list(range(1, 13))
    model: Any = recall.model
    with torch.no_grad():
        said = model(torch.tensor([ids])).logits[0].argmax(dim=-1).tolist()
    assert ids[len(prompt) :] == said[len(prompt) - 1 : -1]
    assert record_keys(recall, ids, len(prompt), chunk=64).expected == 1.0
