"""Runs at toy size: learning, going on bit by bit, interrupts, the finished folder and its card."""

import json
import signal
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import training
from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from penstock.evaluate.tasks import Sample
from penstock.models.loader import load
from tests.ready_process import ReadyProcess
from training import adapter, card_sittings, evaluate, model_card, train
from training.checkpoint import load_checkpoint, read_vocabulary, save_checkpoint, write_sums
from training.data import Batch, RowMaker
from training.examine import mark
from training.model import Pieces, build, difference, working_backend
from training.optimizer import orthogonal
from training.settings import read_settings
from training.trainer import Trainer, TrainingError

ROOT = Path(training.__file__).parents[1]
TOY = ROOT / "training" / "configs" / "toy.toml"
VOCABULARY = read_vocabulary()
CPU = torch.device("cpu")


def write(settings_text: dict[str, str], path: Path) -> Path:
    text = TOY.read_text()
    for old, new in settings_text.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


SHORT = {
    "micro_batch_tokens = 2048": "micro_batch_tokens = 512",
    "steps = 20": "steps = 4",
    "samples = 2": "samples = 1",
}


def test_forward_is_that_of_transformers() -> None:
    settings = read_settings(TOY)
    model = build(settings.model, len(VOCABULARY), 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 4 * torch.rand_like(parameter))  # norms are not all one
    tokens = torch.randint(4, 1400, (3, 100))
    assert difference(model, tokens, Pieces.plain(), torch.float32) < 1e-5
    fresh = build(settings.model, len(VOCABULARY), 3)
    assert 1e-5 < difference(fresh, tokens, Pieces.plain(), torch.bfloat16) < 0.02


def test_a_wrong_forward_is_refused(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.model._RMS_EPS", 1.0)
    settings = replace(toy.small(), model=replace(toy.small().model, init_std=0.5))
    monkeypatch.setattr("training.trainer.build", lambda *args: other_eps(build(*args)))
    with pytest.raises(TrainingError, match="differs from transformers"):
        Trainer(settings, VOCABULARY, CPU)


def other_eps(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-6
    return model


def test_a_backend_that_cannot_is_not_taken() -> None:
    assert working_backend("cudnn", CPU, 32) == "auto"
    assert working_backend("auto", CPU, 32) == "auto"


def test_orthogonal_makes_singular_values_alike() -> None:
    torch.manual_seed(0)
    for shape in ((4, 24, 40), (4, 40, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_loss_falls_on_what_can_be_memorised() -> None:
    settings = read_settings(TOY)
    trainer = Trainer(settings, VOCABULARY, CPU)
    batch = RowMaker(settings, VOCABULARY).batch(0)
    losses = []
    for _ in range(12):
        trainer.step([batch])
        losses.append(trainer.figures().loss)
    assert losses[0] > 6.5  # nothing known: log 1472 is 7.3
    assert losses[-1] < 0.6 * losses[0]


def test_gradients_of_micro_batches_add_up(toy: Any) -> None:
    settings = toy.small()
    first, second = toy.batches_of(settings)[0]
    assert first.tokens.shape == second.tokens.shape
    joined: dict[str, Any] = {
        field.name: np.concatenate([getattr(first, field.name), getattr(second, field.name)])
        for field in fields(Batch)
        if field.name != "grid"
    }
    joined["places"][len(first.places) :] += first.tokens.size
    whole = Batch(**joined)
    one, two = (Trainer(settings, VOCABULARY, CPU) for _ in range(2))
    one.step([whole])
    two.step([first, second])
    assert one.figures().loss == pytest.approx(two.figures().loss, rel=1e-5)
    torch.testing.assert_close(toy.parameters(one), toy.parameters(two), rtol=0, atol=2e-4)


def test_going_on_gives_the_same_bits(toy: Any, tmp_path: Path) -> None:
    settings = toy.small()
    batches = toy.batches_of(settings)
    through = Trainer(settings, VOCABULARY, CPU)
    for step in batches:
        through.step(step)
    first = Trainer(settings, VOCABULARY, CPU)
    for step in batches[:2]:
        first.step(step)
    save_checkpoint(tmp_path, first.state_dict())
    later = Trainer(settings, VOCABULARY, CPU)
    state = load_checkpoint(tmp_path)
    assert state is not None
    later.load_state_dict(state)
    assert later.steps_done == 2
    assert torch.equal(toy.parameters(first), toy.parameters(later))
    for step in toy.batches_of(settings)[2:]:
        later.step(step)
    assert torch.equal(toy.parameters(through), toy.parameters(later))
    assert not torch.equal(toy.parameters(first), toy.parameters(later))


def test_other_settings_cannot_take_up_a_checkpoint(toy: Any) -> None:
    settings = toy.small()
    state = Trainer(settings, VOCABULARY, CPU).state_dict()
    other = replace(settings, optimizer=replace(settings.optimizer, matrix_rate=0.01))
    with pytest.raises(ConfigError, match=r"another optimizer\.matrix_rate"):
        Trainer(other, VOCABULARY, CPU).load_state_dict(state)
    faster = replace(settings, speed=replace(settings.speed, compile=True))
    Trainer(faster, VOCABULARY, CPU).load_state_dict(state)  # what is learnt is the same


def test_a_loss_that_is_no_number_is_not_kept(toy: Any) -> None:
    settings = toy.small()
    trainer = Trainer(settings, VOCABULARY, CPU)
    with torch.no_grad():
        next(iter(trainer.model.parameters())).fill_(float("nan"))
    trainer.step(toy.batches_of(settings)[0])
    with pytest.raises(TrainingError, match="not a number"):
        trainer.figures()


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from training import checkpoint
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
checkpoint.os.replace = die
checkpoint.save_checkpoint(Path(sys.argv[1]), {"steps_done": 2, "x": torch.ones(1000)})
"""


def test_a_checkpoint_survives_being_killed_before_the_renaming(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"steps_done": 1, "x": torch.zeros(10)})
    with ReadyProcess(KILLED, str(tmp_path), folder=ROOT) as killed:
        assert killed.wait() == -signal.SIGKILL, killed.errors()
    assert (tmp_path / "checkpoint.pt.partial").exists()
    state = load_checkpoint(tmp_path)
    assert state is not None
    assert state["steps_done"] == 1
    assert not (tmp_path / "checkpoint.pt.partial").exists()


def test_an_unreadable_checkpoint_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="delete it to begin again"):
        load_checkpoint(tmp_path)


COMMAND = """
import sys
from training import train
sys.stderr = sys.stdout
sys.exit(train.main(sys.argv[1:]))
"""


def test_ctrl_c_saves_what_there_is(tmp_path: Path) -> None:
    endless = write({"steps = 20": "steps = 5000"}, tmp_path / "endless.toml")
    words = (str(endless), "--workers", "1", "--out", str(tmp_path / "run"))
    with ReadyProcess(COMMAND, *words, folder=ROOT) as run:
        for line in run.stdout:
            if "processes make data" in line:
                time.sleep(1)
                run.send_signal(signal.SIGINT)
                break
        rest = run.stdout.read()
        assert run.wait() == 3, rest
    assert "SIGINT" in rest
    state = load_checkpoint(tmp_path / "run")
    assert state is not None
    assert 0 < state["steps_done"] < 10_000
    assert f"stopped at step {state['steps_done']:,}" in rest


def test_a_resumed_run_leaves_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(SHORT, tmp_path / "short.toml")

    def run(name: str, *more: str) -> int:
        return train.main([str(path), "--out", str(tmp_path / name), "--workers", "0", *more])

    assert run("through") == 0
    asked = iter([""] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(train.Stop, "reason", lambda self: next(asked, "the time is up"))
        assert run("in two") == 3
    assert run("in two") == 2, "a checkpoint is not overwritten unasked"
    state = load_checkpoint(tmp_path / "in two")
    assert state is not None
    assert state["steps_done"] == 3
    assert run("in two", "--resume", "--scale", "2") == 2
    assert run("in two", "--resume") == 0
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("through", "in two")
    ]
    assert weights[0] == weights[1]
    log = card_sittings.read_log(tmp_path / "in two" / "log.jsonl")
    assert [record["step"] for record in log if record["kind"] == "begin"] == [0, 3]


def test_a_seed_may_be_given(tmp_path: Path) -> None:
    path = write(SHORT, tmp_path / "short.toml")

    def run(name: str, *more: str) -> int:
        words = [str(path), "--out", str(tmp_path / name), "--workers", "0", *more]
        return train.main([*words, "--minutes", "0.01"])

    assert run("own") == run("other", "--seed", "7") == 3
    own, other = (load_checkpoint(tmp_path / name) for name in ("own", "other"))
    assert own is not None
    assert other is not None
    assert (own["settings"]["seed"], other["settings"]["seed"]) == (0, 7)
    name = "model.embed_tokens.weight"
    assert not torch.equal(own["model"][name], other["model"][name])
    begin = (tmp_path / "other" / "log.jsonl").read_text().splitlines()[0]
    assert json.loads(begin)["settings"]["seed"] == 7
    assert run("other", "--resume") == 2, "the seed is a setting like any other"
    assert run("other", "--resume", "--seed", "7") == 3


def test_time_that_is_up_stops_before_the_first_step(tmp_path: Path) -> None:
    assert (
        train.main([str(TOY), "--out", str(tmp_path), "--workers", "0", "--minutes", "0.01"]) == 3
    )
    state = load_checkpoint(tmp_path)
    assert state is not None
    assert state["steps_done"] == 0
    assert train.main([str(TOY), "--out", str(tmp_path), "--workers", "0", "--export"]) == 0
    assert (tmp_path / "model" / "SHA256SUMS").is_file()


def test_log_forgets_what_the_checkpoint_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"kind": "train", "step": step}) for step in (5, 10, 15)]
    path.write_text("\n".join([*lines, '{"kind": "tr']))
    train.Log(path, steps_done=10).add("train", 12, loss=1.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [5, 10, 12]
    train.Log(path, steps_done=0)
    assert path.read_text() == ""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    path = write(SHORT, folder / "short.toml")
    path.write_text(f"sharpen = 1.5\n{path.read_text()}")
    assert train.main([str(path), "--out", str(folder / "toy"), "--workers", "0"]) == 0
    return folder / "toy"


def sums_hold(folder: Path) -> bool:
    before = (folder / "SHA256SUMS").read_text()
    write_sums(folder)
    return (folder / "SHA256SUMS").read_text() == before


def test_the_finished_folder_is_a_model_of_penstock(finished: Path) -> None:
    loaded = load(finished / "model")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.get_vocab() == VOCABULARY
    assert next(loaded.model.parameters()).dtype == torch.bfloat16
    state = load_checkpoint(finished)
    assert state is not None
    for name, weight in loaded.model.state_dict().items():
        times = 1.5 if name.endswith("q_norm.weight") else 1.0
        assert torch.equal(weight, (state["model"][name] * times).bfloat16()), name
    assert sums_hold(finished / "model")


@pytest.mark.slow
def test_adapter_evaluation_and_card(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = finished / "model"
    assert adapter.main([str(model), "--tokens", "256", "--samples", "1"]) == 0
    assert (model / "adapter.safetensors").is_file()
    model_card.write_card(finished, finished / "evaluation.json")
    assert "Not measured." in (model / "README.md").read_text()
    out = finished / "evaluation.json"
    words = [str(model), "--tokens", "60,256", "--samples", "2", "--tasks", "copy,long_walk",
             "--generate", "1", "--generate-most", "50", "--dtype", "float32",
             "--out", str(out)]  # fmt: skip
    assert evaluate.main(words) == 0
    assert "greedy decoding of " in capsys.readouterr().out
    cells = {(c["task"], c["tokens"]): c for c in Result.load(out).figures["cells"]}
    assert cells["copy", 256]["asked"] == cells["long_walk", 256]["asked"] == 2
    assert cells["copy", 256]["generated"] == 1
    assert "too short" in cells["long_walk", 60]["refused"]
    assert model_card.main([str(finished)]) == 0
    card = (model / "README.md").read_text()
    assert "long_walk" in card
    assert "16 steps" not in card
    assert "8 of 8 steps" in card
    assert (model / "curves.svg").is_file()
    assert "curves.svg" in card
    assert "Attention's logits times 1.5 at the end" in card
    assert sums_hold(model)


def test_marks_count_tokens() -> None:
    sample = Sample("t", "The sky is", "blue sky .", 4, ("blue sky .",))
    right = [VOCABULARY[word] for word in ("blue", "sky", ".")]

    def seen(last: int) -> tuple[bool, int, int]:
        found = mark(lambda ids, count: torch.tensor([*right, last]), sample, VOCABULARY, "cpu")
        return found.exact, found.right_tokens, found.tokens

    assert seen(2) == (True, 4, 4)  # <eos>
    assert seen(3) == (False, 3, 4)


def test_the_package_does_not_know_the_training() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert "import training" not in text
        assert "from training" not in text
