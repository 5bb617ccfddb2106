"""A row of `search.speed`: one variant's walk, whole or at places."""

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.core.shape import KVShape
from penstock.engine.beams.decoding import Beam, GroupDone, StepRequest, StepResult
from penstock.evaluate.result import without_folder
from penstock.evaluate.sitting import say
from penstock.models.beam_cache import block_shape
from penstock.models.beam_decoder import ModelBeamDecoder, make_decoder
from penstock.models.cache_settings import limit_bytes
from penstock.models.loader import CausalLM
from penstock.search.draws import candidate_uniforms, make_choose
from penstock.search.transfer_estimate import Parents, random_parents
from penstock.search.transfer_model import TransferRequest
from research.search.variants import (
    BASELINE,
    IN_MEMORY,
    VARIANTS,
    Prediction,
    SearchCase,
    comparison,
    predict,
    request_totals,
)

# A step-wise search whose survivors are drawn by lot, whatever the model says ---------------------

OnGroup = Callable[[GroupDone], None]


def genealogy(request: TransferRequest, seed: int) -> Parents:
    """Who goes on from whom, step by step: the same for every variant of a case."""
    return random_parents(request, seed)


class SearchWalk:
    """Candidates of one search, step after step.

    A seeded draw decides who survives and not the scores, so that every variant walks the same
    tree and a plan can know it beforehand. End tokens end nothing.

    Attributes:
        step: whose candidates are held; -1 before the first.
    """

    def __init__(
        self, decoder: ModelBeamDecoder, root: Beam, case: SearchCase, parents: Parents
    ) -> None:
        """Start behind a prompt; `root` stays the caller's."""
        self._decoder, self._root, self._case, self._parents = decoder, root, case, parents
        self._choose = make_choose()
        self._beams: list[Beam] = []
        self.step = -1

    def expand(self) -> float:
        """Draw the survivors of a step and fork them: the next step's candidates.

        Returns:
            Seconds that it took.
        """
        began, former = time.perf_counter(), self._beams
        if self.step < 0:
            self._beams = self._decoder.fork(self._root, self._case.beams)
        else:
            # Forks of one survivor stand together, survivors in the order of the draw.
            chosen = Counter(int(parent) for parent in self._parents[self.step])
            self._beams = [
                beam for parent, count in chosen.items()
                for beam in self._decoder.fork(former[parent], count)
            ]  # fmt: skip
            for beam in former:
                self._decoder.release(beam)
        self.step += 1
        return time.perf_counter() - began

    def decode(
        self, num_tokens: int, on_group: OnGroup | None = None, *, only: int | None = None
    ) -> StepResult:
        """Run a step of the candidates.

        Args:
            num_tokens: that room is made for.
            only: end after so many tokens all the same.

        Raises:
            BudgetError: fast memory does not hold one beam.
        """
        case = self._case

        def stops(beam: int, new: Sequence[int]) -> bool:
            return only is not None and len(new) >= only

        return self._decoder.run_step(
            self._beams,
            StepRequest(
                num_tokens=num_tokens,
                uniforms=candidate_uniforms(case.seed, self.step, len(self._beams), num_tokens),
                choose=self._choose, stops=None if only is None else stops, on_group=on_group,
            ),
        )  # fmt: skip

    def skip(self) -> None:
        """As if the candidates had decoded and saved their step."""
        tokens = self._case.tokens_of(self.step)
        for beam in self._beams:
            self._decoder.lengthen(beam, tokens)

    def move(self) -> StepResult:
        """Move what the candidates' step moves, and compute nothing."""
        return self._decoder.pretend_step(self._beams, self._case.tokens_of(self.step))

    def go_to(
        self, step: int, moving: int = 0, on_moved: Callable[[StepResult], None] | None = None
    ) -> None:
        """Leave out the steps before this one; the last `moving` of them move what they do."""
        while self.step < step - 1:
            self.expand()
            if self.step < step - moving:
                self.skip()
                continue
            result = self.move()
            if on_moved is not None:
                on_moved(result)

    def restart(self) -> None:
        """Let all candidates go; the first step is next."""
        while self._beams:
            self._decoder.release(self._beams.pop())
        self.step = -1


# One variant over one case, every step of it or some places ---------------------------------------

_PAGE_BYTES = 4096
_SAY_EVERY_S = 10.0
_REHEARSED = 2
"""Tokens of layer-wise offloading that do not count, at each place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchBench:
    """What the rows of a run share."""

    model: CausalLM
    device: torch.device
    memory: str
    store: str
    lengths: list[int]
    repeat: int
    lead_in: int
    """Steps before a place that move their blocks without computing."""
    moves_all: bool
    """Whether variants that share loads move the blocks of all steps, to count them."""
    row_seconds: float
    """Layer-wise, a step at a place ends when it has taken about this long."""
    cuda_graphs: bool


class SearchRow:
    """A decoder of one variant and the search that it walks."""

    def __init__(self, bench: SearchBench, case: SearchCase, name: str) -> None:
        """Make the decoder.

        Raises:
            BudgetError: the memory does not hold one beam.
            StorageError: the store cannot be used.
        """
        self._bench, self._case, self._name = bench, case, name
        self._variant = VARIANTS[name]
        self._shape = block_shape(bench.model, case.block_tokens)
        self._decoder = make_decoder(
            bench.model, beams=case.beams, width=case.width, max_tokens=case.max_tokens,
            memory=None if name == IN_MEMORY else bench.memory, store=bench.store,
            block_tokens=case.block_tokens, cuda_graphs=bench.cuda_graphs,
            **self._variant.arguments,
        )  # fmt: skip
        self._said = time.perf_counter()
        self._entries: list[dict[str, Any]] = []
        self._moved: list[dict[str, Any]] = []

    def run(self, *, whole: bool) -> dict[str, Any]:
        """Walk the search.

        Args:
            whole: every step; else some, with the way to them lengthened and not computed.

        Returns:
            The row's figures.

        Raises:
            ConfigError: sizes with which there are no places.
            FetchError: the slow tier failed.
        """
        case, decoder = self._case, self._decoder
        request = case.transfers(self.shape, self._budget_bytes())
        parents = genealogy(request, case.seed)
        prediction = predict(case, self._variant, self.shape, self._fast_bytes(), parents)
        places = [] if whole else case.steps_at(self._bench.lengths, self._bench.repeat)
        began = time.perf_counter()
        draw = random.Random(case.seed)
        prompt = [draw.randrange(decoder.vocabulary) for _ in range(case.prompt_tokens)]
        root = decoder.prefill(prompt)
        self._wait()
        figures: dict[str, Any] = {"way": "whole" if whole else "places"}
        figures["prefill_s"] = time.perf_counter() - began
        walk = SearchWalk(decoder, root, case, parents)
        began = time.perf_counter()
        if whole:
            for step in range(case.num_steps):
                self._measure(walk, prediction, case.tokens_of(step), place=step)
        else:
            visit = self._visit_layerwise if self._name == BASELINE else self._visit
            visit(walk, prediction, places)
        figures["walk_s"] = time.perf_counter() - began
        figures["steps"], figures["moved"] = self._entries, self._moved
        figures["request"] = request_totals(case, self._entries, prediction, self._moved)
        figures["compared"] = comparison(self._entries)
        figures["compared_moved"] = comparison(self._moved) if self._moved else None
        return figures | self._circumstances()

    @property
    def shape(self) -> KVShape:
        """Of all layers of the model."""
        return self._shape.kv

    def _visit(
        self, walk: SearchWalk, prediction: Prediction, places: Sequence[Sequence[int]]
    ) -> None:
        """Go to every place as if all before it had been decoded, and measure its steps.

        The first of them is rehearsed: kernels are compiled and CUDA graphs recorded (a search
        does that now and then, when a group's shape is new). The last steps before it move their
        blocks without computing, so that fast memory holds what the search would have left in it.
        Where beams share what is loaded, the whole search moves its blocks once before all that:
        bytes there go up and down with the survivors.
        """
        case, bench = self._case, self._bench
        if self._variant.in_steps and self._variant.overlap and bench.moves_all:
            walk.go_to(case.num_steps, case.num_steps, partial(self._note, walk, prediction))
        moving = bench.lead_in if self._variant.in_steps else case.num_steps
        for place, steps in enumerate(places):
            self._rehearse(walk, steps[0], case.block_tokens)
            walk.restart()
            walk.go_to(steps[0], moving)
            for step in steps:
                self._measure(walk, prediction, case.tokens_of(step), place=place)

    def _visit_layerwise(
        self, walk: SearchWalk, prediction: Prediction, places: Sequence[Sequence[int]]
    ) -> None:
        """The same for the baseline, to which it is all one what lay in fast memory before.

        The rehearsal ends before a block is full: layers give up room then, and for good. A step
        may be cut, so that every place is gone to from the start.
        """
        for place, steps in enumerate(places):
            self._rehearse(walk, steps[0], _REHEARSED)
            walk.restart()
            walk.go_to(steps[0])
            for step in steps:
                tokens = self._affordable(prediction, step, self._case.tokens_of(step))
                self._measure(walk, prediction, tokens, place=place)
                if tokens < self._case.tokens_of(step):
                    break

    def _rehearse(self, walk: SearchWalk, step: int, tokens: int) -> None:
        """The first tokens of a step, with the groups of the whole step."""
        walk.restart()
        walk.go_to(step)
        walk.expand()
        walk.decode(self._case.tokens_of(step), self._say, only=tokens)

    def _affordable(self, prediction: Prediction, step: int, tokens: int) -> int:
        """Tokens of a step in whole blocks, so that it takes about the seconds it may."""
        if not self._entries:
            return tokens
        last, block = self._entries[-1], self._case.block_tokens
        each = last["seconds"] / last["tokens"]
        before = prediction.loaded(last["step"], block)
        if before:
            each *= max(1.0, prediction.loaded(step, block) / before)
        blocks = max(1, int(self._bench.row_seconds / max(each, 1e-9)) // block)
        return min(tokens, blocks * block)

    def _measure(
        self, walk: SearchWalk, prediction: Prediction, tokens: int, *, place: int
    ) -> None:
        """Expand and decode one step; takes down what it moved and how long it took."""
        self._wait()
        expand_s = walk.expand()
        result = walk.decode(tokens, self._say)
        self._wait()
        traffic = result.traffic
        self._entries.append({
            **self._counts(walk, prediction, result, tokens), "place": place,
            "seconds": traffic.seconds, "stall_s": traffic.stall_s, "expand_s": expand_s,
            "seconds_per_token": traffic.seconds / tokens,
            "tokens_per_s": self._case.beams * tokens / traffic.seconds,
            "stall_share": traffic.stall_s / traffic.seconds,
        })  # fmt: skip

    def _note(self, walk: SearchWalk, prediction: Prediction, result: StepResult) -> None:
        """Take down what a step moved that was not computed."""
        tokens = self._case.tokens_of(walk.step)
        self._moved.append(self._counts(walk, prediction, result, tokens))
        self._say(None)

    def _counts(
        self, walk: SearchWalk, prediction: Prediction, result: StepResult, tokens: int
    ) -> dict[str, Any]:
        step, traffic = walk.step, result.traffic
        return {
            "step": step, "length": self._case.start_of(step), "tokens": tokens,
            "groups": [len(group) for group in result.groups],
            "loaded_bytes": traffic.loaded_bytes, "prefetched_bytes": traffic.prefetched_bytes,
            "written_bytes": traffic.written_bytes, "copied_bytes": traffic.copied_bytes,
            "predicted_bytes": prediction.loaded(step, tokens),
            "full_block_bytes": prediction.in_blocks(step, tokens),
        }  # fmt: skip

    def _say(self, done: GroupDone | None) -> None:
        """A line now and then: how far the search is."""
        now = time.perf_counter()
        if now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        said = f"{len(self._entries)} steps measured, {len(self._moved)} moved"
        if done is not None:
            said = f"group {done.index + 1} of {done.num_groups}, {said}"
        if self._entries:
            last = self._entries[-1]
            said += f"; at {last['length']:,}: {1e3 * last['seconds_per_token']:.1f} ms a token"
        say(f"      {said}")

    def _wait(self) -> None:
        if self._bench.device.type == "cuda":
            torch.cuda.synchronize()

    # Memory -----------------------------------------------------------------------------------

    def _budget_bytes(self) -> int:
        """What `memory` means for this case."""
        full = -(-self._case.max_tokens // self._case.block_tokens) * self._case.beams
        full *= self._shape.block_bytes
        return limit_bytes(self._bench.memory, full, self._bench.device) or full

    def _fast_bytes(self) -> int:
        """Of it, what the engine has slots for: the transfer model's memory."""
        items = self._decoder.report().items
        if self._variant.strategy == "layerwise":
            layer = self._shape.layer_bytes
            return items["resident layers"] // self._padded(layer) * layer
        block = self._shape.block_bytes
        return items["beam slots"] // self._padded(block) * block

    def _padded(self, num_bytes: int) -> int:
        """A place in host memory takes whole pages."""
        if self._bench.device.type == "cuda":
            return num_bytes
        return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES

    def _circumstances(self) -> dict[str, Any]:
        report, decoder = self._decoder.report(), self._decoder
        memory = {
            "budget_bytes": self._budget_bytes(), "used_bytes": report.used_bytes,
            "kv_bytes": self._fast_bytes(), "full_bytes": report.full_cache_bytes,
            "items": dict(report.items), "over_budget": self._name == IN_MEMORY,
        }  # fmt: skip
        if self._bench.device.type == "cuda":
            memory["gpu_peak_bytes"] = torch.cuda.max_memory_allocated(self._bench.device)
        return {
            "memory": memory, "store": without_folder(decoder.store_description),
            "simulated": decoder.simulated, "notices": list(decoder.notices),
        }  # fmt: skip

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        self._decoder.close()
        gc.collect()
        if self._bench.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_row(bench: SearchBench, case: SearchCase, name: str, *, whole: bool) -> dict[str, Any]:
    """A row's figures; its decoder is closed whichever way it ends.

    Raises:
        PenstockError: the variant cannot run so.
    """
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    row = SearchRow(bench, case, name)
    try:
        return row.run(whole=whole)
    finally:
        row.close()
