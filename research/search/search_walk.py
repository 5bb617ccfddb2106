"""SearchWalk: a step-wise search whose survivors are drawn by lot, whatever the model says."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.engine.beams.decoding import Beam, GroupDone, StepRequest, StepResult
from penstock.models.beam_decoder import ModelBeamDecoder
from penstock.search.draws import candidate_uniforms, make_choose
from penstock.search.transfer_estimate import Parents, random_parents
from penstock.search.transfer_model import TransferRequest
from research.search.variants import SearchCase

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
