"""What peers are given: a random model for speed, another for recall, and the samples.

Models are made once and kept; a folder's name says what it depends on. Samples are written anew.
"""

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packed_model import coded_file, packed_folder
from transformers import AutoTokenizer

import penstock
from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import TASKS, Sample, judge, make_sample
from penstock.evaluate.tasks.real.registry import ANSWERED, RealTasks
from penstock.models.model_config import read_config
from penstock.models.plain_model import ARCHITECTURES, random_model

HERE = Path(__file__).resolve().parent
_GGUF = str(HERE / "gguf_model.py")
_QUESTION = "Question :"
_MAX_POSITIONS = 131072
BUNDLED = "recall"
PLAIN = "bf16"
_QUESTION_TOKENS = 64
"""Of a real task's prompt, more than its question has."""


@dataclass(frozen=True)
class Models:
    """Where the models lie."""

    speed: Path
    recall: Path

    def of(self, job: str) -> Path:
        """The folder for a job."""
        return self.recall if job == "recall" else self.speed


def prepare_models(
    store: Path, config: str, seed: int, *, recall: str = BUNDLED, coded: bool = False
) -> Models:
    """Folders in a form that old and new releases of transformers read alike.

    Args:
        recall: "recall", or a folder of a pretrained model with bf16 weights.
        coded: the speed model gets no plain weights, which may be too large: random 4-bit codes in
            a GGUF file are all it has.
    """
    speed = store / (f"{config}-coded" if coded else f"{config}-seed{seed}")
    if not (speed / "config.json").is_file():
        if coded:
            _publish(speed, ARCHITECTURES[config](_MAX_POSITIONS).save_pretrained)
        else:
            model: Any = random_model(config, max_positions=_MAX_POSITIONS, seed=seed)
            _publish(speed, model.save_pretrained)
    bundled = recall == BUNDLED
    source = Path(penstock.__file__).parent / "models" / "recall" if bundled else Path(recall)
    copied = store / source.name
    if not (copied / "config.json").is_file():
        _publish(copied, lambda folder: _link(source, folder))
    return Models(speed, copied)


def _link(source: Path, folder: Path) -> None:
    """A folder with copies of small files, and links to the weights."""
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
        elif path.is_file():
            shutil.copyfile(path, folder / path.name)


def _publish(folder: Path, write: Any) -> None:
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(part)
    path = part / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    config.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
    config["torch_dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def prepare_gguf(folder: Path, python: Path, weights: str = PLAIN) -> Path:
    """The same weights as GGUF, written by the interpreter of llama.cpp's environment.

    Args:
        weights: "bf16", or a kind that llama.cpp's quantiser makes.

    Raises:
        RuntimeError: the conversion failed.
    """
    coded = coded_file(folder)
    if not any(folder.glob("*.safetensors")):
        if weights != "q4_0":
            raise RuntimeError("the model has 4-bit codes alone, q4_0")
        return _made(coded, [str(python), _GGUF, "--random", str(folder / "config.json")])
    plain = _made(folder.with_name(folder.name + ".gguf"), [str(python), _GGUF, str(folder)])
    if weights == PLAIN:
        return plain
    out = folder.with_name(f"{folder.name}.{weights}.gguf")
    return _made(out, [str(python), _GGUF, str(plain)], weights)


def prepare_packed(folder: Path, python: Path, weights: str) -> Path:
    """Weights packed for Penstock by the interpreter of its environment.

    Returns:
        The folder again: packed weights lie beside it.

    Raises:
        RuntimeError: they could not be packed.
    """
    if weights != PLAIN:
        _run([str(python), str(HERE / "packed_model.py"), str(folder), weights])
    return folder


def weights_bytes(model: Path) -> int:
    """Size of a model's files, and of packed weights beside them."""
    if model.is_file():
        return model.stat().st_size
    files = [*model.glob("model*.safetensors"), *packed_folder(model).rglob("*.safetensors")]
    return sum(path.stat().st_size for path in files)


def _made(out: Path, command: list[str], *more: str) -> Path:
    """A file that a command writes to its last place but `more`."""
    if not out.is_file():
        part = out.with_name(out.name + ".part")
        _run([*command, str(part), *more])
        part.rename(out)
    return out


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])


@dataclass(frozen=True)
class Samples:
    """Questions of one length.

    Attributes:
        path: the file that peers read.
        plain: what is in it.
        score: of the token ids of an answer to the sample of a number, 0 to 1.
    """

    path: Path
    plain: list[dict[str, Any]]
    score: Callable[[Sequence[int], int], float]


def check_tasks(tasks: Sequence[str], recall: str) -> None:
    """Refuse tasks that are not the recall model's.

    Raises:
        ConfigError: names one, and those that are.
    """
    known = list(TASKS if recall == BUNDLED else ANSWERED)
    if unknown := [task for task in tasks if task not in known]:
        raise ConfigError(f"--tasks {unknown[0]} is none of {', '.join(known)}")


def prepare_samples(
    store: Path, model: Path, tasks: Sequence[str], tokens: int, count: int, seed: int
) -> Samples:
    """A file of samples as token ids, so that no peer needs a tokenizer; tasks take turns.

    Args:
        model: the recall model. The bundled one has tasks of its own.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    drawn = (_bundled if model.name == BUNDLED else _real)(
        model, tokenizer, tasks, tokens, count, seed
    )
    plain = [
        {
            "task": sample.task, "prompt_ids": list(ids), "question_start": start,
            "answer_ids": tokenizer(sample.answer, add_special_tokens=False)["input_ids"],
            "eos_id": tokenizer.eos_token_id, "max_new_tokens": sample.max_new_tokens,
        }
        for sample, ids, start in drawn
    ]  # fmt: skip
    path = store / f"samples-{tokens}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in plain), encoding="utf-8")

    def score(answer: Sequence[int], index: int) -> float:
        if model.name == BUNDLED:
            return float(is_right(answer, plain[index]))
        return judge(drawn[index][0], tokenizer.decode(answer, skip_special_tokens=True))

    return Samples(path, plain, score)


Drawn = list[tuple[Sample, Sequence[int], int]]
"""Samples, their token ids, and where the question starts in these."""


def _bundled(
    model: Path, tokenizer: Any, tasks: Sequence[str], tokens: int, count: int, seed: int
) -> Drawn:
    rng = random.Random(f"peers {seed} {tokens}")
    drawn: Drawn = []
    for index in range(count):
        sample = make_sample(tasks[index % len(tasks)], tokens, rng, tokenizer)
        ids = tokenizer(sample.prompt)["input_ids"]
        question = sample.prompt.rindex(_QUESTION)
        drawn.append((sample, ids, len(ids) - len(sample.prompt[question:].split())))
    return drawn


def _real(
    model: Path, tokenizer: Any, tasks: Sequence[str], tokens: int, count: int, seed: int
) -> Drawn:
    positions = read_config(model, model.name).max_position_embeddings
    source = RealTasks(tokenizer, positions=positions)
    drawn: Drawn = []
    for index in range(count):
        [sample] = source.draw(
            tasks[index % len(tasks)], index // len(tasks), 1, tokens=tokens, seed=seed
        )
        ids = sample.token_ids or tokenizer(sample.prompt)["input_ids"]
        drawn.append((sample, ids, len(ids) - _QUESTION_TOKENS))
    return drawn


def is_right(answer: Sequence[int], sample: dict[str, Any]) -> bool:
    """Whether the tokens before the end-of-sequence token are the expected ones."""
    tokens = list(answer)
    if sample["eos_id"] in tokens:
        tokens = tokens[: tokens.index(sample["eos_id"])]
    return tokens == sample["answer_ids"]
