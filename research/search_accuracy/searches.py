"""Searches of `search_accuracy` over one document."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.evaluate.result import without_folder
from penstock.evaluate.tasks import Sample, score
from penstock.models.loader import LoadedModel
from penstock.search.beam_searcher import BeamSearcher, SearchMemory
from penstock.search.search_params import SearchParams
from penstock.search.search_tree import SearchOutput
from penstock.search.step_scorer import LOGPROB
from research.search_accuracy.verifier import follow, rate_hops, read_rules

VERIFIED, LOGPROB_SEARCH = "verified", "logprob"
"""Step-wise search, rated by the verifier or by log-probability."""
BEST_VERIFIED, BEST_LOGPROB = "best_of_verified", "best_of_logprob"
"""Best of N samples, chosen by either."""
SINGLE, GREEDY = "single", "greedy"
"""Every sample for itself, and the most probable token each time."""
RESIDENT = SearchMemory(memory=None, strategy="resident")

Report = Callable[[str, int], None]
"""Told what was run, and how many beams it had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is run on every document."""

    beams: tuple[int, ...]
    """Ascending."""
    width: int
    step_tokens: int
    small: SearchMemory
    """Fast memory for some beams only; the verified search of `small_beams` is run in it again."""
    small_beams: int

    def params(self, beams: int, temperature: float, sample: Sample, seed: int) -> SearchParams:
        """A step-wise search of so many beams.

        Raises:
            ConfigError: the beams cannot be shared out.
        """
        return SearchParams(
            beams=beams, width=self.width, step_tokens=self.step_tokens, seed=seed,
            max_new_tokens=sample.max_new_tokens, temperature=temperature,
        )  # fmt: skip


def answer_greedily(loaded: LoadedModel, sample: Sample) -> dict[str, Any]:
    """The record of a document without randomness: the most probable token each time."""
    params = SearchParams(
        beams=1, width=1, step_tokens=sample.max_new_tokens, temperature=0.0, seed=0,
        max_new_tokens=sample.max_new_tokens,
    )  # fmt: skip
    output = BeamSearcher(loaded, memory=RESIDENT).search(sample.prompt, params)
    return {"methods": {GREEDY: _judged(sample, [_best_text(output)])}}


def answer_document(
    loaded: LoadedModel, sample: Sample, plan: Plan, *, temperature: float, seed: int,
    checked: bool, report: Report,
) -> dict[str, Any]:  # fmt: skip
    """The record of a document at one temperature: who was right, and how far each came.

    Best of N are the first N samples of the largest N: the draws of a sample depend on its number
    and on nothing else. The first of them is what each method says with one beam.

    Args:
        seed: of this document's searches.
        checked: run one search again in small memory.
        report: called after each search.
    """
    most = plan.beams[-1]
    texts = _samples(loaded, sample, most, temperature, seed)
    report("independent samples", most)
    said: dict[str, list[str]] = {SINGLE: [text for text, _ in texts]}
    rated = rate_hops(sample.prompt, said[SINGLE])
    for name, scores in ((BEST_VERIFIED, rated), (BEST_LOGPROB, [log for _, log in texts])):
        said[name] = [texts[_first_best(scores[:count])][0] for count in plan.beams]
    record: dict[str, Any] = {}
    for name, scorer in ((VERIFIED, rate_hops), (LOGPROB_SEARCH, LOGPROB)):
        said[name] = []
        for beams in plan.beams:
            if beams == 1:
                said[name].append(said[SINGLE][0])
                continue
            params = plan.params(beams, temperature, sample, seed)
            output = BeamSearcher(loaded, scorer=scorer, memory=RESIDENT).search(
                sample.prompt, params
            )
            said[name].append(_best_text(output))
            report(f"search by {name}", beams)
            if checked and name == VERIFIED and beams == plan.small_beams:
                record["small_memory"] = _again(loaded, sample, plan, params, output)
                report("the same in small memory", beams)
    record["methods"] = {name: _judged(sample, answers) for name, answers in said.items()}
    return record


def searches_of(plan: Plan, *, checked: bool) -> list[int]:
    """Beams of every search that `answer_document` runs."""
    searched = [beams for beams in plan.beams if beams > 1]
    again = [plan.small_beams] if checked else []
    return [plan.beams[-1], *searched, *searched, *again]


def _samples(
    loaded: LoadedModel, sample: Sample, count: int, temperature: float, seed: int
) -> list[tuple[str, float]]:
    """Independent samples in their order: text, and log-probability per token."""
    params = SearchParams(
        beams=count, width=1, step_tokens=sample.max_new_tokens, temperature=temperature,
        max_new_tokens=sample.max_new_tokens, seed=seed,
    )  # fmt: skip
    output = BeamSearcher(loaded, memory=RESIDENT).search(sample.prompt, params)
    assert len(output.steps) == 1, "a sample is one step"
    return [(node.text, node.score) for node in output.tree]


def _again(
    loaded: LoadedModel, sample: Sample, plan: Plan, params: SearchParams, output: SearchOutput
) -> dict[str, Any]:
    """Run a search again in small memory, and compare everything that was said and rated."""
    again = BeamSearcher(loaded, scorer=rate_hops, memory=plan.small).search(sample.prompt, params)
    place = again.place
    assert place is not None
    return {
        "beams": params.beams,
        "same_answer": _best_text(again) == _best_text(output),
        "same_tree": _rated(again) == _rated(output),
        "right": int(score(sample, _best_text(again))),
        "limit_bytes": place.memory.limit_bytes, "full_bytes": place.memory.full_cache_bytes,
        "loaded_bytes": again.traffic.loaded_bytes, "written_bytes": again.traffic.written_bytes,
        "most_groups": max(len(step.group_sizes) for step in again.steps),
        "store": without_folder(place.store),
    }  # fmt: skip


def _rated(output: SearchOutput) -> list[Any]:
    """Every candidate with its parent, tokens, score and fate."""
    return [(node.parent, node.token_ids, node.score, node.fate) for node in output.tree]


def _best_text(output: SearchOutput) -> str:
    return "" if output.best is None else output.best.text


def _first_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda at: (scores[at], -at))


def _judged(sample: Sample, answers: Sequence[str]) -> dict[str, list[int]]:
    """For every answer, whether it is the whole path, and how many hops of the path it has."""
    rules, start = read_rules(sample.prompt)
    return {
        "right": [int(score(sample, text)) for text in answers],
        "hops": [follow(rules, start, text).hops for text in answers],
    }


def small_memory(memory: str, store: str) -> SearchMemory:
    """Beams in groups, with all that scheduling has."""
    return replace(SearchMemory(), memory=memory, store=store, strategy="scheduled")
