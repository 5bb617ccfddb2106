"""The training itself: one step after the other, what it knows saved and taken up again."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate.tasks import Words
from training.checkpoint import read_weights, sum_of
from training.data import GENERATORS, Batch
from training.examine import draw_sample, mark
from training.feed import OnDevice, Packed
from training.model import (
    Pieces,
    attention_backend,
    build,
    difference,
    guess_logits,
    guess_losses,
    hidden_states,
    working_backend,
)
from training.optimizer import Optimizers
from training.recorder import Recorder
from training.settings import Attention, RunSettings

GLANCE_SEED = 987_654_321
"""Of the samples that are looked at during training; `training.evaluate` takes another."""
_DIFFERENCE_MOST = {torch.float32: 1e-3, torch.bfloat16: 0.05}


class TrainingError(PenstockError):
    """The run cannot go on: the loss is not a number, or the fast forward is not the model's."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was seen since the last look."""

    loss: float
    """Weighted mean cross entropy in nats, the mean over steps."""
    by_task: dict[str, float]
    """Mean cross entropy of answer tokens, by task (of all tokens of plain prose)."""


class Trainer:
    """A model in training.

    Args:
        settings: of the run.
        vocabulary: words with their ids.
        device: where it is trained. On a GPU in bfloat16 with float32 parameters, on a CPU in
            float32.

    Raises:
        TrainingError: the fast forward pass does not give the model's own logits.
    """

    def __init__(
        self, settings: RunSettings, vocabulary: Mapping[str, int], device: torch.device
    ) -> None:
        on_gpu = device.type == "cuda"
        self._settings = settings
        self._vocabulary = vocabulary
        self._device = device
        self._dtype = torch.bfloat16 if on_gpu else torch.float32
        wanted = settings.speed.attention if on_gpu else "auto"
        self.attention = working_backend(wanted, device, settings.model.head_dim)
        # Every sample has a length of its own, and cuDNN plans anew for each length.
        self._glance_attention: Attention = "flash" if on_gpu else "auto"
        self.model = self._built().to(device)
        recorded = on_gpu and settings.speed.graphs
        self.optimizers = Optimizers(self.model, settings.optimizer, recorded=recorded)
        self._recorder = Recorder(device) if recorded else None
        self._blocks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.steps_done = 0
        self.trained_s = 0.0
        self.begun_with: dict[str, str] | None = None
        self.spent_s = 0.0  # of all sittings, waiting and glances included; kept by the sitting
        self._tasks = settings.groups
        self._loss_sum = torch.zeros((), device=device)
        # The last column is for tokens outside answers.
        size = (2, len(self._tasks) + 1)
        self._by_task = torch.zeros(size, device=device, dtype=torch.float64)
        self._steps_seen = 0
        compiled = on_gpu and settings.speed.compile
        self._pieces = Pieces.compiled() if compiled else Pieces.plain()
        self._compare_forwards()

    def begin_with(self, folder: Path) -> None:
        """Take a finished model's weights instead of random ones, before the first step.

        Args:
            folder: that a run has left as `model/`.

        Raises:
            ConfigError: it holds no such model, or one of another shape or vocabulary.
        """
        assert self.steps_done == 0
        weights = read_weights(folder, self.model.config, self._vocabulary)
        self.model.load_state_dict(weights)
        self.begun_with = {"model": f"{folder.parent.name}/{folder.name}", "sha256": sum_of(folder)}

    def step(self, batches: Sequence[Batch | Packed], rate: float | None = None) -> None:
        """One optimizer step over some micro-batches; adds to the figures and the time.

        Args:
            batches: whose gradients are added up.
            rate: factor of the learning rates; None: as the settings' schedule has it.
        """
        began = time.perf_counter()
        packed = [self._packed(batch) for batch in batches]
        whole = sum(batch.weight for batch in packed)
        factor = self._settings.rate_at(self.steps_done) if rate is None else rate
        if self._recorder is None:
            for batch in packed:
                self._learn_from(batch.on(self._device), whole)
            self.optimizers.step(factor)
        else:
            for batch in packed:
                self._replay(self._recorder, batch, whole)
            self.optimizers.set_rates(factor)
            self._recorder.run("optimizers", self.optimizers.apply)
            self._recorder.end_step()
        self._steps_seen += 1
        self.steps_done += 1
        self.trained_s += time.perf_counter() - began

    def figures(self) -> Figures:
        """What was seen since the last call; waits for the device.

        Raises:
            TrainingError: the loss is not a number any more.
        """
        assert self._steps_seen
        began = time.perf_counter()
        loss = float(self._loss_sum) / self._steps_seen
        sums, counts = self._by_task.tolist()
        self.trained_s += time.perf_counter() - began
        if not torch.isfinite(torch.tensor(loss)):
            raise TrainingError(
                f"the loss is not a number at step {self.steps_done}; the last checkpoint is "
                "sound: lower the learning rates and resume from it, or begin again"
            )
        by_task = {task: sums[at] / counts[at] for at, task in enumerate(self._tasks) if counts[at]}
        self._forget()
        return Figures(loss, by_task)

    def held_back_loss(self) -> dict[str, float]:
        """Mean loss by length on text that is not trained on; nothing without such text."""
        return {}

    def glance(self) -> Iterator[tuple[str, int, float, float]]:
        """Exact match on a few fresh samples: task, prompt tokens, exact share, token share."""
        plan = self._settings.evaluation
        words = Words.of(self._vocabulary)
        done = max(0, self.steps_done - 1)
        reached = max(self._settings.stage_at(done).lengths)
        for length in (length for length in plan.lengths if length <= reached):
            for task in (task for task in self._tasks if task in GENERATORS):
                try:
                    samples = [
                        draw_sample(task, n, tokens=length, seed=GLANCE_SEED, words=words)
                        for n in range(plan.samples)
                    ]
                except ConfigError:  # too short for this task
                    continue
                if any(length + s.max_new_tokens > self._settings.model.positions for s in samples):
                    continue
                marks = [mark(self._guess, s, self._vocabulary, self._device) for s in samples]
                exact = sum(m.exact for m in marks) / len(marks)
                tokens = sum(m.right_tokens for m in marks) / sum(m.tokens for m in marks)
                yield task, length, exact, tokens

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on. The data follow from the step alone."""
        state: dict[str, Any] = {
            "settings": self._settings.as_dict(),
            "steps_done": self.steps_done,
            "trained_s": self.trained_s,
            "spent_s": self.spent_s,
            "begun_with": self.begun_with,
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "cpu_rng": torch.get_rng_state(),
        }
        if self._device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint.

        Raises:
            ConfigError: it was made with other settings; names the first that differs.
        """
        changed = _first_change(state["settings"], self._settings.as_dict())
        if changed is not None:
            raise ConfigError(
                f"cannot resume: the checkpoint was made with another {changed}; give the same "
                "settings and --scale, or another --out"
            )
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.steps_done = state["steps_done"]
        self.trained_s = state["trained_s"]
        self.spent_s = state["spent_s"]
        self.begun_with = state.get("begun_with")
        torch.set_rng_state(state["cpu_rng"])
        if self._device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self._device)

    def _learn_from(self, batch: OnDevice, whole: float | Tensor) -> None:
        """The batch's part of the step's gradients and figures; nothing is waited for.

        Args:
            whole: weight of all of the step's batches.
        """
        with attention_backend(self.attention):
            hidden = self._hidden(batch, self._pieces)
        losses = guess_losses(self.model, hidden, batch.places, batch.targets)
        seen = torch.stack([losses.detach(), torch.ones_like(losses)]).double()
        self._by_task.index_add_(1, batch.groups % (len(self._tasks) + 1), seen)
        loss = (losses * batch.weights).sum() / whole
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss_sum += loss.detach()

    def _built(self) -> Any:
        """A model with random weights, on the CPU."""
        return build(self._settings.model, len(self._vocabulary), self._settings.seed)

    def _hidden(self, batch: OnDevice, pieces: Pieces) -> Tensor:
        """What stands behind the last norm, row by row. [rows * length, hidden]"""
        return hidden_states(self.model, batch.tokens, batch.positions, pieces, self._dtype)

    def _difference(self) -> float:
        """See `training.model.difference`, on a few tokens."""
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(4, len(self._vocabulary), (2, 128), generator=draw)
        return difference(self.model, tokens.to(self._device), Pieces.plain(), self._dtype)

    def _replay(self, recorder: Recorder, packed: Packed, whole: float) -> None:
        """The same by a recorder: a batch's content goes where those of its shape lie."""
        shape = packed.rows, packed.length, packed.guesses, *packed.grid
        if shape not in self._blocks:
            block = torch.empty_like(packed.content, device=self._device)
            self._blocks[shape] = block, torch.zeros((), device=self._device)
        block, total = self._blocks[shape]
        block.copy_(packed.content, non_blocking=True)
        total.fill_(whole)
        recorder.run(shape, lambda: self._learn_from(packed.unpacked(block), total))

    def _packed(self, batch: Batch | Packed) -> Packed:
        if isinstance(batch, Packed):
            return batch
        pin = self._device.type == "cuda"
        return Packed.of(batch, pin=pin, padded=self._recorder is not None)

    def _guess(self, ids: Tensor, count: int) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with attention_backend(self._glance_attention):
            hidden = hidden_states(self.model, ids, positions, Pieces.plain(), self._dtype)
        places = torch.arange(ids.shape[1] - count - 1, ids.shape[1] - 1, device=ids.device)
        return guess_logits(self.model, hidden, places).argmax(-1)

    def _compare_forwards(self) -> None:
        """See that the fast forward, as it is run here, is the model's."""
        with attention_backend(self.attention):
            off = self._difference()
        if not off <= _DIFFERENCE_MOST[self._dtype]:
            raise TrainingError(
                f"the training's forward pass differs from transformers' by {off:.2g} of the "
                'logits\' range; try speed.attention = "auto"'
            )

    def _forget(self) -> None:
        """Begin new figures; they stay where they are."""
        self._loss_sum.zero_()
        self._by_task.zero_()
        self._steps_seen = 0


def _first_change(before: Any, now: Any, name: str = "") -> str | None:
    """Name of the first setting that differs between two plain trees; speed may differ."""
    if name == ".speed":
        return None
    if isinstance(before, dict) and isinstance(now, dict) and list(before) == list(now):
        changes = (_first_change(before[key], now[key], f"{name}.{key}") for key in now)
        return next((change for change in changes if change is not None), None)
    return None if before == now else name.removeprefix(".") or "set of settings"
