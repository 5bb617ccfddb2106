"""PlainDecoder: the oracle of beam decoders, which computes every token from the whole sequence."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from penstock.core.errors import BudgetError, CacheStateError
from penstock.core.ledger import MemoryReport
from penstock.engine.beams.decoding import Beam, GroupDone, StepRequest, StepResult, StepTraffic
from penstock.models.model_shape import inspect_model


class PlainBeam(Beam):
    """A sequence as its tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)

    @property
    @override
    def length(self) -> int:  # type: ignore[override]
        """Tokens of the sequence, prompt included."""
        return len(self.token_ids)


class PlainDecoder:
    """A `BeamDecoder` without any cache: each token comes from the model's plain forward.

    Sequences run one at a time, so that nothing depends on who runs with whom. Moves no bytes.

    Args:
        model: a transformers decoder in evaluation mode.
        max_tokens: of a sequence, prompt included; None: the model's positions.
        group_size: beams that count as one group; None: all of them.

    Attributes:
        alive: beams that have not been released.
        num_released: beams that have been.
        most_alive: most beams held at once.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_tokens: int | None = None,
        group_size: int | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._group_size = group_size
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.max_tokens = max_tokens or inspect_model(model).max_positions
        self.alive: list[PlainBeam] = []
        self.num_released = self.most_alive = 0
        self.is_closed = False
        self.store_description = "nowhere: every token is computed anew"
        self.simulated: str | None = None
        self.notices: list[str] = []

    def report(self) -> MemoryReport:
        """No bytes at all."""
        return MemoryReport(limit_bytes=0, used_bytes=0, peak_bytes=0, full_cache_bytes=0, items={})

    def prefill(
        self, token_ids: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> Beam:
        """A beam of the prompt."""
        self._check_open()
        if len(token_ids) > self.max_tokens:
            raise BudgetError(f"{len(token_ids)} tokens do not fit into {self.max_tokens}")
        if progress is not None:
            progress(len(token_ids), len(token_ids))
        return self._hold(PlainBeam(token_ids))

    def fork(self, beam: Beam, count: int) -> list[Beam]:
        """Beams with the same tokens."""
        token_ids = self._own(beam).token_ids
        return [self._hold(PlainBeam(token_ids)) for _ in range(count)]

    def run_step(self, beams: Sequence[Beam], request: StepRequest) -> StepResult:
        """Extend the beams one by one, in groups of `group_size`."""
        began_s = time.perf_counter()
        own = [self._own(beam) for beam in beams]
        assert len({id(beam) for beam in own}) == len(own), "a beam stands twice in a step"
        assert request.uniforms.shape == (len(own), request.num_tokens)
        size = self._group_size or len(own)
        groups = [
            list(range(at, min(at + size, len(own)))) for at in range(0, len(own), size)
        ]  # fmt: skip
        tokens: list[list[int]] = [[] for _ in own]
        numbers: list[list[float]] = [[] for _ in own]
        traffic = StepTraffic()
        for at, group in enumerate(groups):
            for row in group:
                tokens[row], numbers[row] = self._extend(own[row], row, request)
            traffic.seconds = time.perf_counter() - began_s
            if request.on_group is not None:
                request.on_group(
                    GroupDone(
                        index=at, num_groups=len(groups), num_beams=len(group), traffic=traffic
                    )
                )
        return StepResult(
            token_ids=tokens, log_probabilities=numbers, groups=groups, traffic=traffic
        )

    def release(self, beam: Beam) -> None:
        """Forget a beam.

        Raises:
            CacheStateError: it was released before, or is none of this decoder's.
        """
        own = self._own(beam)
        self.alive = [beam for beam in self.alive if beam is not own]
        self.num_released += 1

    def close(self) -> None:
        """Forget all beams; nothing runs any more."""
        self.alive = []
        self.is_closed = True

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """What the model says comes next. float32 [1, vocabulary]"""
        inputs = torch.tensor([list(token_ids)], device=self._model.device)
        with torch.no_grad():
            logits: Tensor = self._model(input_ids=inputs, use_cache=False).logits[:, -1]
        return logits.float()

    def _extend(
        self, beam: PlainBeam, row: int, request: StepRequest
    ) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        numbers: list[float] = []
        for at in range(request.num_tokens):
            if beam.length >= self.max_tokens:
                raise BudgetError(f"a beam does not fit into {self.max_tokens} tokens")
            uniform = request.uniforms[row, at : at + 1].to(self._model.device)
            token, number = request.choose(self.logits(beam.token_ids), uniform)
            tokens.append(int(token))
            numbers.append(float(number))
            beam.token_ids.append(tokens[-1])
            if request.stops is not None and request.stops(row, tokens):
                break
        return tokens, numbers

    def _hold(self, beam: PlainBeam) -> PlainBeam:
        self.alive.append(beam)
        self.most_alive = max(self.most_alive, len(self.alive))
        return beam

    def _own(self, beam: Beam) -> PlainBeam:
        self._check_open()
        for other in self.alive:
            if other is beam:
                return other
        raise CacheStateError("this beam was released before, or is none of this decoder's")

    def _check_open(self) -> None:
        if self.is_closed:
            raise CacheStateError("the decoder is closed")
