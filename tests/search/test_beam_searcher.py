"""BeamSearcher: from a prompt to answers, on the real decoder as on the oracle."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.core.errors import ConfigError, PromptError
from penstock.engine.beams.decoding import Beam, StepRequest, StepResult
from penstock.generation.engine import LLM
from penstock.models.loader import LoadedModel, load
from penstock.search import beam_searcher
from penstock.search.beam_search import BeamSearch
from penstock.search.beam_searcher import BeamSearcher, SearchMemory
from penstock.search.search_params import SearchParams
from penstock.search.search_tree import SearchOutput, SearchStep
from penstock.search.step_scorer import CallableScorer, LogProbabilityScorer
from penstock.search.step_texts import StepTexts
from penstock.testing.plain_decoder import PlainDecoder
from penstock.testing.tiny_models import tiny_model

PROMPT = [5, 9, 14, 3, 77]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    return load("recall", dtype=torch.float32)


def params(**changes: Any) -> SearchParams:
    settings = {"beams": 6, "width": 2, "step_tokens": 3, "max_new_tokens": 12, "seed": 1}
    return SearchParams(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"beams": 0}, "beams=0 must be at least 1"),
        ({"width": 0}, "width=0 must be at least 1"),
        ({"beams": 5}, "beams=5 cannot be shared out .* take a multiple of 2"),
        ({"step_tokens": 0}, "step_tokens=0 must be"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be"),
        ({"temperature": 0}, "temperature=0 makes all continuations of a beam equal"),
        ({"top_k": 1}, "top_k=1 makes all continuations"),
        ({"temperature": 0, "width": 1}, "6 beams search nothing"),
        ({"temperature": -1}, "temperature=-1 must be"),
        ({"top_p": 0}, r"top_p=0 must lie in \(0, 1\]"),
        ({"seed": -1}, "seed=-1 must lie in"),
        ({"seed": 1 << 64}, "must lie in"),
        ({"delimiter": ""}, "delimiter is an empty string"),
        ({"stop": ("a", "")}, "stop holds an empty string"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        params(**changes)
    assert "\n" not in str(caught.value)


@pytest.fixture
def decoders(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[tuple[PlainDecoder, dict[str, Any]]]]:
    """BeamSearcher gets PlainDecoders; lists them with the settings they were asked for."""
    made: list[tuple[PlainDecoder, dict[str, Any]]] = []

    def make_decoder(model: PreTrainedModel, **settings: Any) -> PlainDecoder:
        made.append((PlainDecoder(model, max_tokens=settings["max_tokens"]), settings))
        return made[-1][0]

    monkeypatch.setattr(beam_searcher, "make_decoder", make_decoder)
    yield made
    assert all(decoder.is_closed for decoder, _ in made)


Decoders = list[tuple[PlainDecoder, dict[str, Any]]]


def test_the_searcher_answers_a_text(bundled: LoadedModel, decoders: Decoders) -> None:
    prompts: list[str] = []

    def rate(prompt: str, texts: list[str]) -> list[int]:
        prompts.append(prompt)
        return [len(text) for text in texts]

    memory = SearchMemory(memory="1MiB", store="memory", share=False)
    searcher = BeamSearcher(bundled, scorer=rate, memory=memory)
    assert BeamSearcher(bundled).so_far is None
    settings = params(beams=4, max_new_tokens=6, ignore_end=True)
    output = searcher.search("The sky is", settings)
    assert prompts == ["The sky is"] * 2
    assert output.scorer == "rate"
    assert [len(beam.text) for beam in output.beams] == [beam.score for beam in output.beams]
    assert searcher.so_far is not None
    assert searcher.so_far.beams == output.beams
    [(_, asked)] = decoders
    assert asked["max_tokens"] == len(output.prompt_token_ids) + 6
    assert (asked["beams"], asked["width"], asked["memory"]) == (4, 2, "1MiB")
    assert (asked["share"], asked["overlap"], asked["strategy"]) == (False, True, "scheduled")
    plain = output.as_dict()
    assert plain["tree"][0]["token_ids"] == output.tree.nodes[0].token_ids
    assert plain["traffic"]["loaded_bytes"] == 0


def test_the_models_own_end_token_ends(model: PreTrainedModel, decoders: Decoders) -> None:
    greedy = params(beams=1, width=1, temperature=0)
    end = BeamSearcher(model).search(PROMPT, replace(greedy, ignore_end=True)).beams[0].token_ids[4]
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [end, 159]
    try:
        output = BeamSearcher(model).search(PROMPT, greedy)
        on = BeamSearcher(model).search(PROMPT, params(beams=1, width=1, top_k=1, ignore_end=True))
    finally:
        model.generation_config.eos_token_id = before
    assert output.beams[0].token_ids[-1] == end
    assert output.beams[0].finish_reason == "stop"
    assert len(output.beams[0].token_ids) <= 5
    assert len(on.beams[0].token_ids) == 12


def test_the_models_own_stop_strings_end(
    bundled: LoadedModel, decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The grass is green . The sky is blue . " * 5
    greedy = params(beams=1, width=1, temperature=0)
    whole = BeamSearcher(bundled).search(text, greedy).best
    assert whole is not None
    assert "sky" in whole.text
    monkeypatch.setattr(bundled.model.generation_config, "stop_strings", ["sky"])
    stopped = BeamSearcher(bundled).search(text, greedy).best
    assert stopped is not None
    assert (stopped.text, stopped.finish_reason) == (whole.text.partition("sky")[0], "stop")
    beyond = BeamSearcher(bundled).search(text, replace(greedy, ignore_end=True)).best
    assert beyond is not None
    assert beyond.text.startswith(whole.text)


def test_what_the_searcher_refuses(model: PreTrainedModel, decoders: Decoders) -> None:
    searcher = BeamSearcher(model)
    with pytest.raises(PromptError, match="500 tokens and 40 more"):
        searcher.search([5] * 500, params(max_new_tokens=40))
    with pytest.raises(PromptError, match="zero tokens"):
        searcher.search([], params())
    with pytest.raises(ConfigError, match=r"step_tokens=508 is longer .* 512 pos.* at most 507"):
        searcher.search(PROMPT, params(step_tokens=508))
    with pytest.raises(ConfigError, match="a delimiter needs a tokenizer"):
        searcher.search(PROMPT, params(delimiter="."))
    with pytest.raises(ConfigError, match="scorer <lambda> needs a tokenizer"):
        BeamSearcher(model, scorer=lambda texts: [0.0]).search(PROMPT, params())
    assert decoders == []
    with pytest.raises(PromptError, match="5 tokens and 600 more are asked for"):
        BeamSearch(
            PlainDecoder(model), params(max_new_tokens=600), LogProbabilityScorer(), StepTexts(None)
        ).run(PROMPT)


def test_a_tokenizer_beside_a_model_that_has_one(bundled: LoadedModel) -> None:
    given: Any
    for given in ("recall", bundled):
        for made in (BeamSearcher, LLM):
            with pytest.raises(ConfigError, match="tokenizer is for a transformers model alone"):
                made(given, tokenizer=bundled.tokenizer)
    LLM(bundled.model, tokenizer=bundled.tokenizer)


def test_an_interrupted_searcher_tells_what_it_found(
    bundled: LoadedModel, decoders: Decoders
) -> None:
    def interrupt(step: SearchStep) -> None:
        if step.record.step == 1:
            raise KeyboardInterrupt

    searcher = BeamSearcher(bundled, scorer=CallableScorer(lambda texts: [len(t) for t in texts]))
    with pytest.raises(KeyboardInterrupt):
        searcher.search("The sky is", params(ignore_end=True), on_step=interrupt)
    output = searcher.so_far
    assert output is not None
    assert output.best is not None
    assert len(output.best.token_ids) == 6
    assert decoders[0][0].alive == []


RAGGED = params(beams=4, step_tokens=8, max_new_tokens=12, delimiter=" .", temperature=2.0, seed=46)
"""Beams of different lengths: some come to their limit within a step of others. With this seed no
draw and no choice of a beam is so close that rounding could decide it (`Decisive`)."""
DRAW_MARGIN = 3e-5
"""Of the cumulative probabilities between which a token is drawn, rounding moves those of the
oracle and of every other decoder by up to 3e-6 (both against the model in float64)."""
SCORE_TOLERANCE = 1e-4


class Decisive(PlainDecoder):
    """A PlainDecoder that refuses a draw whose token a slightly different probability would
    change: two correct decoders might disagree about it."""

    def run_step(self, beams: Sequence[Beam], request: StepRequest) -> StepResult:
        """See `BeamDecoder`."""

        def choose(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
            token, number = request.choose(logits, uniforms)
            for moved in (uniforms - DRAW_MARGIN, uniforms + DRAW_MARGIN):
                near, _ = request.choose(logits, moved.clamp(0.0, 1.0 - 2**-53))
                assert torch.equal(near, token), f"{uniforms} is too close: take another seed"
            return token, number

        return super().run_step(beams, replace(request, choose=choose))


@pytest.fixture(scope="module")
def expected(bundled: LoadedModel) -> SearchOutput:
    texts = StepTexts(bundled.tokenizer, delimiter=RAGGED.delimiter)
    assert bundled.tokenizer is not None
    ids = bundled.tokenizer("The grass is green . The sky is blue . The sun is yellow .")
    prompt = list(ids["input_ids"]) * 3
    decoder = Decisive(bundled.model)
    output = BeamSearch(decoder, RAGGED, LogProbabilityScorer(), texts).run(prompt)
    for step in output.steps:
        scores = sorted(node.score for node in output.tree.of_step(step.step))
        assert min(after - before for before, after in pairwise(scores)) > 2 * SCORE_TOLERANCE
    return output


@pytest.mark.parametrize(
    "memory",
    [
        SearchMemory(memory=None, store="memory", strategy="resident"),
        SearchMemory(memory="1/3", store="memory"),
        SearchMemory(memory="1/2", store="memory", strategy="layerwise"),
    ],
    ids=["resident", "scheduled", "layerwise"],
)
def test_the_real_decoder_searches_as_the_oracle_does(
    bundled: LoadedModel, expected: SearchOutput, memory: SearchMemory
) -> None:
    settings = replace(RAGGED, ignore_end=True)
    output = BeamSearcher(bundled, memory=memory).search(expected.prompt_token_ids, settings)
    for field in ("fate", "token_ids", "text", "parent"):
        values = [[getattr(node, field) for node in one.tree] for one in (output, expected)]
        assert values[0] == values[1]
    scores = [node.score for node in output.tree]
    assert scores == pytest.approx([node.score for node in expected.tree], abs=SCORE_TOLERANCE)
    assert len({node.num_tokens for node in output.tree.of_step(1)}) > 1
    assert output.place is not None
    assert 0 < output.place.memory.peak_bytes <= output.place.memory.limit_bytes
    assert (output.traffic.loaded_bytes > 0) == (memory.strategy != "resident")
