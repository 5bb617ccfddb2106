"""What peers are given: a random model for speed, the bundled one for recall, and the samples.

Models are made once and kept; a folder's name says what it depends on. Samples are written anew.
"""

import json
import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock.evaluate.tasks import make_sample
from penstock.models.loader import load
from penstock.models.plain_model import random_model

HERE = Path(__file__).resolve().parent
_QUESTION = "Question :"
_MAX_POSITIONS = 40960


@dataclass(frozen=True)
class Models:
    """Where the models lie."""

    speed: Path
    recall: Path

    def of(self, job: str) -> Path:
        """The folder for a job."""
        return self.speed if job == "speed" else self.recall


def prepare_models(store: Path, config: str, seed: int) -> Models:
    """Folders in a form that old and new releases of transformers read alike."""
    speed = store / f"{config}-seed{seed}"
    if not (speed / "config.json").is_file():
        model: Any = random_model(config, max_positions=_MAX_POSITIONS, seed=seed)
        _publish(speed, model.save_pretrained)
    recall = store / "recall"
    if not (recall / "config.json").is_file():
        bundled = Path(penstock.__file__).parent / "models" / "recall"
        _publish(recall, lambda folder: shutil.copytree(bundled, folder, dirs_exist_ok=True))
    return Models(speed, recall)


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


def prepare_gguf(folder: Path, python: Path) -> Path:
    """The same weights as GGUF, written by the interpreter of llama.cpp's environment.

    Raises:
        RuntimeError: the conversion failed.
    """
    out = folder.with_name(folder.name + ".gguf")
    if not out.is_file():
        part = out.with_name(out.name + ".part")
        done = subprocess.run(
            [str(python), str(HERE / "gguf_model.py"), str(folder), str(part)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
        part.rename(out)
    return out


def prepare_samples(
    store: Path, tasks: Sequence[str], tokens: int, count: int, seed: int
) -> tuple[Path, list[dict[str, Any]]]:
    """A file of samples as token ids, so that no peer needs a tokenizer; tasks take turns."""
    tokenizer: Any = load("recall").tokenizer
    rng = random.Random(f"peers {seed} {tokens}")
    samples = []
    for index in range(count):
        sample = make_sample(tasks[index % len(tasks)], tokens, rng, tokenizer)
        ids = tokenizer(sample.prompt)["input_ids"]
        question = sample.prompt.rindex(_QUESTION)
        samples.append({
            "task": sample.task, "prompt_ids": ids,
            "question_start": len(ids) - len(sample.prompt[question:].split()),
            "answer_ids": tokenizer(sample.answer, add_special_tokens=False)["input_ids"],
            "eos_id": tokenizer.eos_token_id, "max_new_tokens": sample.max_new_tokens,
        })  # fmt: skip
    path = store / f"samples-{tokens}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return path, samples


def is_right(answer: Sequence[int], sample: dict[str, Any]) -> bool:
    """Whether the tokens before the end-of-sequence token are the expected ones."""
    tokens = list(answer)
    if sample["eos_id"] in tokens:
        tokens = tokens[: tokens.index(sample["eos_id"])]
    return tokens == sample["answer_ids"]
