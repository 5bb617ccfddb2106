"""Checkpoints that survive being killed at any moment; finished models, written and read."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config
from transformers.utils.logging import disable_progress_bar

import penstock.models
from penstock.core.errors import ConfigError, StorageError
from penstock.models.loader import load

TOKENIZER_FOLDER = Path(penstock.models.__file__).parent / "recall"
"""Whose tokenizer a new model of recall rows has."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_NAME = "checkpoint.pt"
_SUMS = "SHA256SUMS"
_WEIGHTS = "model.safetensors"
_QUERY_NORM = ".self_attn.q_norm.weight"
_SHAPE = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "vocab_size", "rope_parameters",
)  # fmt: skip
"""Settings of a model without which its weights are none of another model."""


def save_checkpoint(folder: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint beside the last one and then put it in its place, in one step.

    Args:
        folder: of the run; holds one checkpoint.
        content: plain data and tensors.

    Raises:
        StorageError: it cannot be written; the last checkpoint is as it was.
    """
    partial = folder / f"{_NAME}.partial"
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / _NAME)
        _sync_folder(folder)
    except OSError as error:
        raise StorageError(f"cannot write {folder / _NAME}: {error.strerror or error}") from error


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The run's last whole checkpoint, on the CPU; None: there is none yet.

    Raises:
        ConfigError: it cannot be read.
    """
    (folder / f"{_NAME}.partial").unlink(missing_ok=True)
    path = folder / _NAME
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"cannot read {path}: {error}; delete it to begin again") from error
    assert isinstance(content, dict)
    return content


def read_vocabulary() -> dict[str, int]:
    """The bundled tokenizer's words with their ids."""
    content = json.loads((TOKENIZER_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    return vocabulary


def export(
    model: PreTrainedModel, folder: Path, tokenizer_folder: Path = TOKENIZER_FOLDER, *,
    sharpen: float = 1.0,
) -> None:  # fmt: skip
    """Write the model as a folder that `penstock` and transformers load: bfloat16, tokenizer,
    and `SHA256SUMS` of every file, which `sha256sum --check` reads.

    Args:
        model: as it was trained.
        folder: to write; one that is there is replaced.
        tokenizer_folder: whose tokenizer it has, and processor, if there is one.
        sharpen: how many times larger the logits of its attention become (`training.sharpen`).

    Raises:
        StorageError: it cannot be written.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    state = {
        name: (w.detach().cpu().float() * (sharpen if name.endswith(_QUERY_NORM) else 1)).bfloat16()
        for name, w in model.state_dict().items()
    }
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=False
    )
    disable_progress_bar()
    try:
        copy.save_pretrained(partial)
        there = [name for name in _PROCESSOR_FILES if (tokenizer_folder / name).is_file()]
        for name in (*_TOKENIZER_FILES, *there):
            shutil.copyfile(tokenizer_folder / name, partial / name)
        for path in partial.iterdir():
            path.chmod(0o644)
        write_sums(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error


def read_weights(
    folder: Path, config: Qwen3Config, vocabulary: Mapping[str, int]
) -> dict[str, Tensor]:
    """Weights of a finished model, float32, on the CPU.

    Args:
        folder: as `export` leaves it.
        config: of the model that is to have them.
        vocabulary: its words with their ids.

    Raises:
        ConfigError: there is no such model, or it has another shape or vocabulary.
        ModelLoadError: the folder is incomplete or unreadable.
    """
    if not (folder / _WEIGHTS).is_file():
        raise ConfigError(f"--from {folder}: no {_WEIGHTS} there; give the model/ of a run")
    loaded = load(folder, dtype="float32")
    assert loaded.tokenizer is not None
    for name in _SHAPE:
        theirs, ours = (getattr(one, name, None) for one in (loaded.model.config, config))
        if theirs != ours:
            raise ConfigError(
                f"cannot begin with {folder}: its {name} is {theirs}, the settings have {ours}"
            )
    if loaded.tokenizer.get_vocab() != dict(vocabulary):
        raise ConfigError(f"cannot begin with {folder}: it has another vocabulary")
    return dict(loaded.model.state_dict())


def sum_of(folder: Path) -> str:
    """SHA-256 of a finished model's weights, in hexadecimal.

    Raises:
        ConfigError: they cannot be read.
    """
    try:
        return hashlib.sha256((folder / _WEIGHTS).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {folder / _WEIGHTS}: {error.strerror}") from error


def write_sums(folder: Path) -> None:
    """Write `SHA256SUMS` of all other files of a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.name != _SUMS)
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (folder / _SUMS).write_text("".join(lines), encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    """Make a renaming last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
