"""Recorded steps: the same as others, in memory that stays where it is."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import training
from training.checkpoint import load_checkpoint, read_vocabulary, save_checkpoint
from training.optimizer import Muon, Optimizers
from training.recorder import Recorder
from training.trainer import Trainer

TOY = Path(training.__file__).parent / "configs" / "toy.toml"
VOCABULARY = read_vocabulary()
CPU = torch.device("cpu")


def test_a_rate_that_is_a_tensor_is_a_rate() -> None:
    def after(rate: float | torch.Tensor) -> torch.Tensor:
        matrix = torch.nn.Parameter(torch.arange(12.0).view(4, 3) / 7)
        matrix.grad = torch.linspace(-1, 1, 12).view(4, 3)
        optimizer = Muon([matrix], lr=0.1, momentum=0.9, weight_decay=0.1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        return matrix.detach()

    torch.testing.assert_close(after(0.3), after(torch.tensor(0.3)))


class Inline:
    """A recorder that records nothing, and sees that work of one key finds its memory in place."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        self.keys.append(key)
        work()

    def end_step(self) -> None:
        self.keys.append("end")


def test_a_recorded_step_learns_the_same(toy: Any) -> None:
    settings = toy.small()
    plain, recorded = (Trainer(settings, VOCABULARY, CPU) for _ in range(2))
    recorded.optimizers = Optimizers(recorded.model, settings.optimizer, recorded=True)
    recorder: Any = Inline()
    recorded._recorder = recorder
    held = {id(p.grad) for p in recorded.model.parameters()}
    for step in toy.batches_of(settings):
        plain.step(step)
        recorded.step(step)
    torch.testing.assert_close(toy.parameters(plain), toy.parameters(recorded), rtol=0, atol=1e-5)
    assert {id(p.grad) for p in recorded.model.parameters()} == held, "gradients stay in place"
    one, two = plain.figures(), recorded.figures()
    assert one.loss == pytest.approx(two.loss, rel=1e-4)
    assert one.by_task == pytest.approx(two.by_task, rel=1e-4)
    assert recorder.keys[-2:] == ["optimizers", "end"]
    shapes = [key for key in recorder.keys if isinstance(key, tuple)]
    assert len(shapes) == 2 * recorder.keys.count("optimizers")
    assert 1 <= len(set(shapes)) < len(shapes)
    assert set(shapes) == set(recorded._blocks)


def test_checkpoints_of_recorded_steps_are_as_good_as_others(toy: Any, tmp_path: Path) -> None:
    settings = toy.small()
    first = Trainer(settings, VOCABULARY, CPU)
    first.optimizers = Optimizers(first.model, settings.optimizer, recorded=True)
    first._recorder = cast(Recorder, Inline())
    later = Trainer(settings, VOCABULARY, CPU)
    first_steps, rest = toy.batches_of(settings)[:2], toy.batches_of(settings)[2:]
    for step in first_steps:
        first.step(step)
    save_checkpoint(tmp_path, first.state_dict())
    state = load_checkpoint(tmp_path)
    assert state is not None
    later.load_state_dict(state)
    for step in rest:
        first.step(step)
        later.step(step)
    torch.testing.assert_close(toy.parameters(first), toy.parameters(later), rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_cuda_graphs_of_steps_learn_the_same(toy: Any) -> None:
    settings = toy.small()
    fast = replace(settings, speed=replace(settings.speed, graphs=True))
    gpu = torch.device("cuda")
    plain, recorded = Trainer(settings, VOCABULARY, gpu), Trainer(fast, VOCABULARY, gpu)
    for _ in range(3):  # each shape is warmed up, recorded and replayed
        for step in toy.batches_of(settings):
            plain.step(step)
            recorded.step(step)
    assert recorded._recorder is not None
    assert recorded._recorder._graphs
    assert recorded.figures().loss == pytest.approx(plain.figures().loss, rel=0.02)
    # bfloat16, sums in another order, and updates that are made orthogonal, however small.
    off = (toy.parameters(plain) - toy.parameters(recorded)).abs()
    assert float((off > 0.02).float().mean()) < 1e-3
    assert float(off.mean()) < 2e-3
