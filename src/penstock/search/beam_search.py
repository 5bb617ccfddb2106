"""BeamSearch: step-wise beam search over a BeamDecoder: expand, rate, select.

Source: Wang et al., "Locality-Aware Beam Scheduling for Efficient Test-Time Compute with a
Consumer-Grade GPU", 2.3; Snell et al., "Scaling LLM Test-Time Compute Optimally Can Be More
Effective Than Scaling Parameters for Reasoning".

Each step samples `width` continuations of every surviving beam (`beams` of the prompt in the
first), rates all of them and keeps the best. With a width of 1 that is best of N.

Departures: a beam that is selected when it is finished leaves the search with its score and takes
its place with it, so that the others get no more continuations than before; a candidate whose
score is minus infinity is never kept, even where places are free.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from penstock.core.errors import VerifierError
from penstock.engine.beams.decoding import (
    Beam,
    BeamDecoder,
    GroupDone,
    StepRequest,
    StepResult,
)
from penstock.search.draws import candidate_uniforms, make_choose
from penstock.search.search_params import SearchParams, check_room
from penstock.search.search_tree import (
    Fate,
    SearchBeam,
    SearchFinish,
    SearchNode,
    SearchOutput,
    SearchStep,
    SearchTree,
    StepRecord,
)
from penstock.search.step_scorer import Candidate, StepScorer, checked_scores
from penstock.search.step_texts import StepTexts, text_kept

OnStep = Callable[[SearchStep], None]
OnGroup = Callable[[GroupDone], None]
OnPrefill = Callable[[int, int], None]
"""Called with the prompt's tokens done and its tokens in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Path:
    """One sequence of the search: a beam of the decoder, and what is known about it."""

    beam: Beam
    node: int | None = None
    token_ids: tuple[int, ...] = ()
    text: str = ""
    log_probability: float = 0.0
    score: float = 0.0
    finish: SearchFinish | None = None


class BeamSearch:
    """One search over one prompt; `run` may be called once.

    The tokens are a function of the prompt, the settings and the model's logits: which beams a
    decoder runs together, and where their keys and values lie, change nothing but rounding.

    Args:
        decoder: holds the sequences; every beam of the search is released when `run` ends,
            whichever way.
        params: of the search.
        scorer: rates the candidates of each step.
        texts: of beams; looks out for the delimiter, the stop texts and the end tokens.
        on_step: called after each step.
        on_group: called after each group of a step.
    """

    def __init__(
        self, decoder: BeamDecoder, params: SearchParams, scorer: StepScorer, texts: StepTexts, *,
        on_step: OnStep | None = None, on_group: OnGroup | None = None,
    ) -> None:  # fmt: skip
        self._decoder = decoder
        self._params = replace(params, seed=_seed(params.seed))
        self._scorer = scorer
        self._texts = texts
        self._on_step = on_step
        self._on_group = on_group
        self._choose = make_choose(params.temperature, params.top_k, params.top_p)
        self._alive: list[Beam] = []
        self._live: list[_Path] = []
        self._done: list[_Path] = []
        self._tree = SearchTree()
        self._records: list[StepRecord] = []
        self._prompt: tuple[str, list[int]] = ("", [])
        self._began_s = self._prefill_s = 0.0
        self._complete = False

    def run(
        self, prompt_token_ids: Sequence[int], prompt: str = "", *,
        on_prefill: OnPrefill | None = None,
    ) -> SearchOutput:  # fmt: skip
        """Search.

        Args:
            prompt_token_ids: at least one.
            prompt: their text, for the scorer.

        Raises:
            PromptError: it is empty, or too long for the decoder with `max_new_tokens` behind it.
            VerifierError: the scorer failed, or refused every candidate.
            BudgetError: fast memory is too small.
            FetchError: the slow tier failed.
        """
        assert not self._began_s, "a BeamSearch runs once"
        check_room(len(prompt_token_ids), self._params, self._decoder.max_tokens)
        self._prompt = (prompt, list(prompt_token_ids))
        self._began_s = time.perf_counter()
        try:
            self._live = [
                _Path(beam=self._hold(self._decoder.prefill(self._prompt[1], on_prefill)))
            ]
            self._prefill_s = time.perf_counter() - self._began_s
            while self._live:
                self._step()
            self._complete = True
        finally:
            while self._alive:
                self._decoder.release(self._alive.pop())
        return self.so_far()

    def so_far(self) -> SearchOutput:
        """What is known: after an interrupt, the beams as of the last complete step."""
        paths = [*self._done, *(path for path in self._live if path.node is not None)]
        return SearchOutput(
            prompt=self._prompt[0],
            prompt_token_ids=self._prompt[1],
            beams=[_as_beam(path) for path in sorted(paths, key=lambda path: -path.score)],
            tree=self._tree,
            steps=self._records,
            settings=asdict(self._params),
            scorer=self._scorer.name,
            prefill_s=self._prefill_s,
            wall_s=time.perf_counter() - self._began_s if self._began_s else 0.0,
            interrupted=not self._complete,
        )

    def _step(self) -> None:
        began_s = time.perf_counter()
        children = self._expand()
        result = self._run(children)
        decoded_s = time.perf_counter()
        candidates = [
            self._extend(path, tokens, numbers)
            for path, tokens, numbers in zip(
                children, result.token_ids, result.log_probabilities, strict=True
            )
        ]
        scores = checked_scores(self._scorer, [self._as_candidate(path) for path in candidates])
        scored_s = time.perf_counter()
        fates = self._select(candidates, scores)
        nodes = self._note(children, candidates, scores, fates)
        record = StepRecord(
            step=len(self._records), num_candidates=len(nodes), num_kept=fates.count("kept"),
            num_finished=fates.count("finished"), new_tokens=sum(map(len, result.token_ids)),
            group_sizes=[len(group) for group in result.groups], traffic=result.traffic,
            decode_s=decoded_s - began_s, score_s=scored_s - decoded_s,
        )  # fmt: skip
        self._records.append(record)
        self._advance(candidates, nodes)
        if self._on_step is not None:
            self._on_step(
                SearchStep(
                    record=record, most_steps=self._params.most_steps, nodes=nodes,
                    tree=self._tree, num_live=len(self._live), num_finished=len(self._done),
                )
            )  # fmt: skip

    def _expand(self) -> list[_Path]:
        """Fork every live beam; the forks of one stand together."""
        count = self._params.width if self._records else self._params.beams
        children = []
        for path in self._live:
            beams = [path.beam]
            if count > 1:
                beams = self._decoder.fork(path.beam, count)
                self._alive.extend(beams)
                self._release(path.beam)
            children += [replace(path, beam=beam) for beam in beams]
        return children

    def _run(self, paths: Sequence[_Path]) -> StepResult:
        left = [self._params.max_new_tokens - len(path.token_ids) for path in paths]
        most = min(self._params.step_tokens, max(left))

        def stops(index: int, new: Sequence[int]) -> bool:
            if len(new) >= left[index]:
                return True
            tokens = [*paths[index].token_ids[-self._texts.window :], *new]
            return self._texts.ends_beam(tokens) or self._texts.ends_step(tokens)

        seed = self._params.seed
        assert seed is not None
        return self._decoder.run_step(
            [path.beam for path in paths],
            StepRequest(
                num_tokens=most,
                uniforms=candidate_uniforms(seed, len(self._records), len(paths), most),
                choose=self._choose,
                stops=stops if self._texts.watches or min(left) < most else None,
                on_group=self._on_group,
            ),
        )

    def _extend(
        self, path: _Path, tokens: Sequence[int], log_probabilities: Sequence[float]
    ) -> _Path:
        token_ids = (*path.token_ids, *tokens)
        finish: SearchFinish | None = None
        if self._texts.ends_beam(token_ids):
            finish = "stop"
        elif len(token_ids) >= self._params.max_new_tokens:
            finish = "length"
        return replace(
            path, token_ids=token_ids, text=self._texts.answer(token_ids), finish=finish,
            log_probability=path.log_probability + sum(log_probabilities),
        )  # fmt: skip

    def _as_candidate(self, path: _Path) -> Candidate:
        return Candidate(
            prompt=self._prompt[0], prompt_token_ids=self._prompt[1], text=path.text,
            token_ids=path.token_ids, log_probability=path.log_probability,
            is_finished=path.finish is not None,
        )  # fmt: skip

    def _select(self, candidates: Sequence[_Path], scores: Sequence[float]) -> list[Fate]:
        """The best get the places that finished beams have not taken; of equals, the first."""
        places = self._params.survivors - len(self._done)
        order = sorted(range(len(scores)), key=lambda at: -scores[at])
        fates: list[Fate] = ["pruned"] * len(scores)
        for at in order[:places]:
            if scores[at] > float("-inf"):
                fates[at] = "kept" if candidates[at].finish is None else "finished"
        if all(fate == "pruned" for fate in fates) and not self._done:
            raise VerifierError(
                f"scorer {self._scorer.name} refused all {len(scores)} candidates of step "
                f"{len(self._records) + 1} (minus infinity); take more beams, or let it rate them"
            )
        return fates

    def _note(
        self, parents: Sequence[_Path], candidates: Sequence[_Path], scores: Sequence[float],
        fates: Sequence[Fate],
    ) -> list[SearchNode]:  # fmt: skip
        """Put a step's candidates into the tree; `parents` are the same paths before the step."""
        nodes: list[SearchNode] = []
        for before, path, score, fate in zip(parents, candidates, scores, fates, strict=True):
            kept = text_kept(before.text, path.text)
            nodes.append(
                SearchNode(
                    id=len(self._tree) + len(nodes), parent=before.node, step=len(self._records),
                    token_ids=list(path.token_ids[len(before.token_ids) :]),
                    text=path.text[kept:], text_start=kept, num_tokens=len(path.token_ids),
                    score=score, fate=fate, log_probability=path.log_probability,
                )
            )  # fmt: skip
        self._tree.nodes.extend(nodes)
        return nodes

    def _advance(self, candidates: Sequence[_Path], nodes: Sequence[SearchNode]) -> None:
        """Let go of what was pruned or is finished; the rest lives on, best first."""
        rated = [
            replace(path, node=node.id, score=node.score)
            for path, node in zip(candidates, nodes, strict=True)
        ]
        kept = [path for path, node in zip(rated, nodes, strict=True) if node.fate == "kept"]
        self._live = sorted(kept, key=lambda path: -path.score)
        self._done += [p for p, node in zip(rated, nodes, strict=True) if node.fate == "finished"]
        for path, node in zip(rated, nodes, strict=True):
            if node.fate != "kept":
                self._release(path.beam)

    def _hold(self, beam: Beam) -> Beam:
        self._alive.append(beam)
        return beam

    def _release(self, beam: Beam) -> None:
        """Forget a beam, then let the decoder free it: never twice, whatever comes between."""
        at = next(at for at, other in enumerate(self._alive) if other is beam)
        self._decoder.release(self._alive.pop(at))


def _seed(seed: int | None) -> int:
    return secrets.randbits(32) if seed is None else seed


def _as_beam(path: _Path) -> SearchBeam:
    assert path.node is not None
    return SearchBeam(
        text=path.text, token_ids=list(path.token_ids), score=path.score,
        log_probability=path.log_probability, finish_reason=path.finish or "interrupted",
        node=path.node,
    )  # fmt: skip
