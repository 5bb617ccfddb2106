"""Step-wise beam search: what it keeps, when it ends, and that nothing of it stays behind."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock.core.errors import CacheStateError, VerifierError
from penstock.engine.beams.decoding import Beam, GroupDone, StepRequest, StepResult
from penstock.models.loader import LoadedModel, load
from penstock.search.beam_search import BeamSearch
from penstock.search.search_params import SearchParams
from penstock.search.search_tree import SearchOutput, SearchStep
from penstock.search.step_scorer import (
    Candidate,
    LogProbabilityScorer,
    StepScorer,
)
from penstock.search.step_texts import StepTexts
from penstock.testing.plain_decoder import PlainDecoder
from penstock.testing.tiny_models import tiny_model

PROMPT = [5, 9, 14, 3, 77]
END = 2


class ByTokens:
    """Scores candidates by a function of their tokens behind the prompt."""

    name = "by_tokens"

    def __init__(self, rate: Callable[[Sequence[int]], float]) -> None:
        self._rate = rate
        self.seen: list[list[Candidate]] = []

    def score(self, candidates: Sequence[Candidate]) -> list[float]:
        self.seen.append(list(candidates))
        return [self._rate(one.token_ids) for one in candidates]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    return load("recall", dtype=torch.float32)


def params(**changes: Any) -> SearchParams:
    settings = {"beams": 6, "width": 2, "step_tokens": 3, "max_new_tokens": 12, "seed": 1}
    return SearchParams(**{**settings, **changes})


def search(
    model: PreTrainedModel,
    settings: SearchParams,
    scorer: StepScorer | None = None,
    *,
    texts: StepTexts | None = None,
    group_size: int | None = None,
    on_step: Callable[[SearchStep], None] | None = None,
    on_group: Callable[[GroupDone], None] | None = None,
    prompt: Sequence[int] = PROMPT,
) -> SearchOutput:
    """Run a search, and see that every beam was released exactly once."""
    decoder = PlainDecoder(model, group_size=group_size)
    one = BeamSearch(
        decoder, settings, scorer or LogProbabilityScorer(), texts or StepTexts(None),
        on_step=on_step, on_group=on_group,
    )  # fmt: skip
    output = one.run(prompt)
    assert decoder.alive == []
    assert decoder.most_alive <= settings.beams + settings.survivors
    check_tree(output)
    return output


def check_tree(output: SearchOutput) -> None:
    """What holds in every tree."""
    tree = output.tree
    assert [node.id for node in tree] == list(range(len(tree)))
    for node in tree:
        parent = None if node.parent is None else tree.nodes[node.parent]
        assert node.step == (0 if parent is None else parent.step + 1)
        before = 0 if parent is None else parent.num_tokens
        assert node.num_tokens == before + len(node.token_ids)
        assert node.num_tokens == len(tree.token_ids(node.id))
        assert len(node.token_ids) >= 1
        assert parent is None or parent.fate == "kept"
    for record in output.steps:
        nodes = tree.of_step(record.step)
        fates = [node.fate for node in nodes]
        assert len(nodes) == record.num_candidates == sum(record.group_sizes)
        assert fates.count("kept") == record.num_kept
        assert fates.count("finished") == record.num_finished
        assert sum(len(node.token_ids) for node in nodes) == record.new_tokens
        worst = min((n.score for n in nodes if n.fate != "pruned"), default=math.inf)
        assert all(node.score <= worst for node in nodes if node.fate == "pruned")
    finished = [node.id for node in tree if node.fate == "finished"]
    if not output.interrupted:
        assert sorted(beam.node for beam in output.beams) == finished
    for beam in output.beams:
        node = tree.nodes[beam.node]
        assert (beam.score, beam.log_probability) == (node.score, node.log_probability)
        assert beam.token_ids == tree.token_ids(beam.node)
    scores = [beam.score for beam in output.beams]
    assert scores == sorted(scores, reverse=True)


def test_a_search_by_log_probability(model: PreTrainedModel) -> None:
    output = search(model, params())
    assert len(output.beams) == 3
    assert [record.num_candidates for record in output.steps] == [6, 6, 6, 6]
    assert [record.num_kept for record in output.steps] == [3, 3, 3, 0]
    assert all(len(beam.token_ids) == 12 for beam in output.beams)
    assert {beam.finish_reason for beam in output.beams} == {"length"}
    assert output.new_tokens == 4 * 6 * 3
    assert output.best is output.beams[0]
    decoder = PlainDecoder(model)
    for beam in output.beams:
        sequence = [*PROMPT, *beam.token_ids]
        numbers = [
            float(decoder.logits(sequence[:at]).log_softmax(-1)[0, sequence[at]])
            for at in range(len(PROMPT), len(sequence))
        ]
        assert beam.log_probability == pytest.approx(sum(numbers), abs=1e-4)
        assert beam.score == pytest.approx(sum(numbers) / 12, abs=1e-5)


def test_children_of_a_beam_differ_and_share_its_past(model: PreTrainedModel) -> None:
    tree = search(model, params(temperature=2.0)).tree
    second = tree.of_step(1)
    parents = [node.parent for node in second]
    assert parents == sorted(parents, key=parents.index)
    assert all(parents.count(parent) == 2 for parent in parents)
    assert len({tuple(node.token_ids) for node in second}) == 6


def test_seeds_repeat_whatever_the_groups(model: PreTrainedModel) -> None:
    short = params(max_new_tokens=6)
    first = search(model, short)
    for group_size in (None, 1, 4):
        again = search(model, short, group_size=group_size)
        assert again.tree == first.tree
        assert again.beams == first.beams
    assert search(model, params(max_new_tokens=6, seed=2)).beams != first.beams


def test_a_drawn_seed_is_named(model: PreTrainedModel) -> None:
    output = search(model, params(seed=None, max_new_tokens=6))
    seed = output.settings["seed"]
    assert isinstance(seed, int)
    assert search(model, params(seed=seed, max_new_tokens=6)).beams == output.beams


def test_width_one_is_best_of_n(model: PreTrainedModel) -> None:
    output = search(model, params(width=1, beams=5))
    assert len(output.beams) == 5
    assert not [node for node in output.tree if node.fate == "pruned"]
    assert len({tuple(beam.token_ids) for beam in output.beams}) == 5
    for beam in output.beams:
        path = output.tree.path(beam.node)
        assert [node.step for node in path] == [0, 1, 2, 3]
    whole = search(model, params(width=1, beams=5, step_tokens=12))
    assert len(whole.steps) == 1
    alone = search(model, params(width=1, beams=1, temperature=0))
    token_ids = list(PROMPT)
    for _ in range(12):
        token_ids.append(int(PlainDecoder(model).logits(token_ids).argmax()))
    assert alone.beams[0].token_ids == token_ids[len(PROMPT) :]


def test_pruning_keeps_the_best(model: PreTrainedModel) -> None:
    scorer = ByTokens(lambda tokens: float(sum(tokens)))
    output = search(model, params(temperature=3.0), scorer)
    for record in output.steps:
        nodes = output.tree.of_step(record.step)
        sums = {node.id: sum(output.tree.token_ids(node.id)) for node in nodes}
        best = sorted(sums.values(), reverse=True)[:3]
        assert sorted((sums[n.id] for n in nodes if n.fate != "pruned"), reverse=True) == best
    assert [len(seen) for seen in scorer.seen] == [6, 6, 6, 6]
    assert not any(one.is_finished for one in scorer.seen[0])
    assert all(one.is_finished for one in scorer.seen[3])
    assert scorer.seen[2][0].num_tokens == 9
    assert list(scorer.seen[2][0].prompt_token_ids) == PROMPT


def test_finished_beams_leave_with_their_places(model: PreTrainedModel) -> None:
    """The end token is made common; a beam that has it is liked."""
    ends = frozenset(range(0, 160, 7))
    scorer = ByTokens(lambda tokens: float(tokens[-1] in ends) + len(tokens) / 100)
    output = search(
        model, params(beams=8, temperature=4.0, max_new_tokens=18), scorer,
        texts=StepTexts(None, end_token_ids=ends),
    )  # fmt: skip
    done = 0
    for record in output.steps:
        assert record.num_kept <= 4 - done - record.num_finished
        done += record.num_finished
    assert [r.num_candidates for r in output.steps[1:]] == [
        2 * r.num_kept for r in output.steps[:-1]
    ]
    assert output.steps[-1].num_kept == 0
    assert len({record.num_candidates for record in output.steps}) > 1
    stopped = [beam for beam in output.beams if beam.finish_reason == "stop"]
    assert stopped
    for beam in stopped:
        assert beam.token_ids[-1] in ends
        assert not set(beam.token_ids[:-1]) & ends
        assert beam.score == pytest.approx(1 + len(beam.token_ids) / 100)


def test_minus_infinity_is_never_kept(model: PreTrainedModel) -> None:
    # The first step has one candidate left, which gets two children as any survivor does.
    firsts: list[int] = []

    def only_the_first(tokens: Sequence[int]) -> float:
        if len(tokens) == 3 and not firsts:
            firsts.append(tokens[0])
            return 0.0
        return -math.inf if len(tokens) == 3 else 1.0

    output = search(model, params(), ByTokens(only_the_first))
    assert [record.num_candidates for record in output.steps] == [6, 2, 4, 6]
    assert len(output.beams) == 3
    with pytest.raises(VerifierError, match="refused all 6 candidates of step 2"):
        search(model, params(), ByTokens(lambda t: -math.inf if len(t) > 3 else 0.0))


@pytest.mark.parametrize("step", [1, 3])
def test_everything_is_released_when_a_scorer_fails(model: PreTrainedModel, step: int) -> None:
    def fail(tokens: Sequence[int]) -> float:
        if len(tokens) == 3 * step:
            raise RuntimeError("no rating today")
        return float(tokens[-1])

    decoder = PlainDecoder(model)
    one = BeamSearch(decoder, params(), ByTokens(fail), StepTexts(None))
    with pytest.raises(VerifierError, match="scorer by_tokens raised RuntimeError: no rating tod"):
        one.run(PROMPT)
    assert decoder.alive == []
    assert decoder.num_released > 6
    output = one.so_far()
    assert len(output.steps) == step - 1
    assert output.interrupted
    assert len(output.beams) == (0 if step == 1 else 3)
    check_tree(output)


class Interrupting(PlainDecoder):
    """Ctrl-C comes at a given call of a method."""

    def __init__(self, model: PreTrainedModel, method: str, call: int) -> None:
        super().__init__(model)
        self._method, self._left = method, call

    def _tick(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt

    def fork(self, beam: Beam, count: int) -> list[Beam]:
        self._tick("fork")
        return super().fork(beam, count)

    def run_step(self, beams: Sequence[Beam], request: StepRequest) -> StepResult:
        result = super().run_step(beams, request)
        self._tick("run_step")
        return result

    def release(self, beam: Beam) -> None:
        super().release(beam)
        self._tick("release")


@pytest.mark.parametrize(
    ("method", "call"),
    [("fork", 1), ("fork", 3), ("run_step", 1), ("run_step", 3), ("release", 1), ("release", 4),
     ("release", 9)],
)  # fmt: skip
def test_ctrl_c_leaves_nothing_behind(model: PreTrainedModel, method: str, call: int) -> None:
    """PlainDecoder refuses a second release, so that none was released twice either."""
    decoder = Interrupting(model, method, call)
    one = BeamSearch(decoder, params(), LogProbabilityScorer(), StepTexts(None))
    with pytest.raises(KeyboardInterrupt):
        one.run(PROMPT)
    assert decoder.alive == []
    output = one.so_far()
    check_tree(output)
    assert output.interrupted
    if call >= 3:
        assert output.best is not None
        assert output.best.finish_reason == "interrupted"


def test_the_oracle_watches_over_its_beams(model: PreTrainedModel) -> None:
    decoder = PlainDecoder(model, max_tokens=20)
    beam = decoder.prefill(PROMPT)
    [fork] = decoder.fork(beam, 1)
    assert beam.length == fork.length == 5
    decoder.release(beam)
    for use in (decoder.release, lambda beam: decoder.fork(beam, 2)):
        with pytest.raises(CacheStateError, match="released before"):
            use(beam)
    decoder.release(fork)
    assert (decoder.num_released, decoder.most_alive, decoder.alive) == (2, 2, [])


def test_callbacks(model: PreTrainedModel) -> None:
    steps: list[SearchStep] = []
    groups: list[GroupDone] = []
    output = search(model, params(), group_size=4, on_step=steps.append, on_group=groups.append)
    assert [step.record for step in steps] == output.steps
    assert [step.record.group_sizes for step in steps] == [[4, 2]] * 4
    assert [(g.index, g.num_groups, g.num_beams) for g in groups] == [(0, 2, 4), (1, 2, 2)] * 4
    assert [(step.num_live, step.num_finished) for step in steps] == [(3, 0)] * 3 + [(0, 3)]
    assert [node for step in steps for node in step.nodes] == output.tree.nodes
    assert {step.most_steps for step in steps} == {4}


def prompt_of(bundled: LoadedModel) -> list[int]:
    assert bundled.tokenizer is not None
    ids = bundled.tokenizer("The grass is green . The sky is blue . The sun is yellow .")
    return list(ids["input_ids"])


def texts_search(bundled: LoadedModel, settings: SearchParams, **watched: Any) -> SearchOutput:
    texts = StepTexts(bundled.tokenizer, **watched)
    prompt = prompt_of(bundled)
    return search(bundled.model, settings, texts=texts, prompt=prompt)


def test_a_delimiter_ends_a_step(bundled: LoadedModel) -> None:
    settings = params(step_tokens=6, max_new_tokens=12, delimiter=" .", temperature=2.0)
    output = texts_search(bundled, settings, delimiter=" .")
    ended = [node for node in output.tree if node.text.endswith(" .")]
    assert len(ended) > 3
    for node in output.tree:
        inside = node.text[:-2] if node.text.endswith(" .") else node.text
        assert " ." not in inside.strip()
        whole = len(node.token_ids) == 6 or node.num_tokens == 12
        assert node.text.endswith(" .") or whole
    assert len({node.num_tokens for node in output.tree.of_step(1)}) > 1
    assert {len(beam.token_ids) for beam in output.beams} == {12}, "all end at the limit"
    assert all(node.num_tokens <= 12 for node in output.tree)


def test_a_stop_text_finishes_a_beam_before_it(bundled: LoadedModel) -> None:
    settings = params(step_tokens=4, max_new_tokens=16, temperature=1.5, beams=4, seed=3)
    output = texts_search(bundled, settings, stop_texts=[" . The"])
    stopped = [beam for beam in output.beams if beam.finish_reason == "stop"]
    assert stopped
    assert bundled.tokenizer is not None
    for beam in stopped:
        assert " . The" not in beam.text
        assert " . The" in bundled.tokenizer.decode(beam.token_ids)
        assert " . The" not in bundled.tokenizer.decode(beam.token_ids[:-1])
    for beam in output.beams:
        assert output.tree.text(beam.node) == beam.text
    paths = [output.tree.path(beam.node) for beam in stopped]
    assert any(last.text_start < len(output.tree.text(before.id)) for *_, before, last in paths), (
        "a stop text that lies across two steps"
    )
