"""converted_folder(): a GGUF file as a model folder, which transformers dequantises once.

The folder is kept in the user's cache under the file's SHA-256, and found there the next time.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from penstock.core.byte_size import format_bytes
from penstock.core.errors import ModelLoadError, StorageError
from penstock.core.regular_file import open_regular
from penstock.models.fetch import OnBytes
from penstock.models.model_shape import inspect_model
from penstock.models.packed.gguf_rows import ARCHITECTURES, file_rows
from penstock.models.packed.rows import plain_model_of_rows

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_PIECE = 1 << 20
_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}$")
_PLAIN_TYPES = {0: torch.float32, 1: torch.float16}
"""By `general.file_type`; the values of all others are dequantised to bfloat16."""
_NAME = "penstock-gguf.json"
"""In a converted folder: where it is from."""
_WORK = "converting-"


def gguf_cache() -> Path:
    """The user's folder of converted files."""
    return Path.home() / ".cache" / "penstock" / "gguf"


def converted_folder(path: Path, on_bytes: OnBytes, cache: Path | None = None) -> tuple[Path, str]:
    """The model folder of a GGUF file; made if it is not there yet.

    Args:
        path: the file.
        on_bytes: called with the progress.
        cache: where converted files are kept; None: `gguf_cache()`.

    Returns:
        The folder, and what to report of it: its place and size; empty if it was there already.

    Raises:
        ModelLoadError: it is no GGUF file, one of several parts, of a kind that transformers does
            not read, or the library for such files is missing.
        UnsupportedModelError: a tiered cache cannot work with the model; says why.
        StorageError: the cache cannot be written.
    """
    folder = _folder_of(path, on_bytes, cache)
    if not _is_made(folder, lambda: _convert(path, folder, on_bytes)):
        return folder, ""
    size = format_bytes(sum(each.stat().st_size for each in folder.iterdir()))
    return folder, f"dequantised, which takes {size} in {folder}; it can be removed at any time"


def described_folder(path: Path, on_bytes: OnBytes, cache: Path | None = None) -> Path:
    """Configuration and tokenizer of a GGUF file as a folder without weights.

    Args:
        As of `converted_folder`.

    Raises:
        As `converted_folder`.
    """
    folder = _folder_of(path, on_bytes, cache)
    folder = folder.with_name(f"{folder.name}-described")
    _is_made(folder, lambda: _describe(path, folder))
    return folder


def architecture_of(path: Path) -> str:
    """The architecture that a GGUF file names; empty where it cannot be read."""
    try:
        from gguf import GGUFReader

        named = GGUFReader(path).get_field("general.architecture")
    except (ImportError, OSError, ValueError):
        return ""
    return "" if named is None else str(named.contents())


def _folder_of(path: Path, on_bytes: OnBytes, cache: Path | None) -> Path:
    if _PART.search(path.stem):
        raise ModelLoadError(
            "it is one of several parts; put them together with: llama-gguf-split --merge"
        )
    return (gguf_cache() if cache is None else cache) / f"{path.stem}-{_sum(path, on_bytes)}"


def _is_made(folder: Path, make: Callable[[], None]) -> bool:
    """Make a folder of the cache; False if it was there already."""
    cache = folder.parent
    try:
        if folder.is_dir():
            return False
        for library in ("gguf", "accelerate"):
            if find_spec(library) is None:
                raise ModelLoadError(
                    f"GGUF files are read with the library {library}, which is missing: pip "
                    "install 'penstock[gguf]'"
                )
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            if folder.is_dir():
                return False
            make()
    except OSError as error:
        if isinstance(error, StorageError) or error.errno is None:
            raise
        raise StorageError(f"cannot write {error.filename or cache}: {error.strerror}") from error
    return True


def _sum(path: Path, on_bytes: OnBytes) -> str:
    """The file's SHA-256, its first 16 digits."""
    digest, done = hashlib.sha256(), 0
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        while piece := file.read(_PIECE):
            if not done and not piece.startswith(_MAGIC):
                raise ModelLoadError("it is no GGUF file")
            digest.update(piece)
            done += len(piece)
            on_bytes(f"reading {path.name}", done, size)
    if not done:
        raise ModelLoadError("it is no GGUF file: it is empty")
    return digest.hexdigest()[:16]


def _convert(path: Path, folder: Path, on_bytes: OnBytes) -> None:
    from gguf import GGUFReader

    for left in folder.parent.glob(f"{_WORK}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    source: Any = {
        "pretrained_model_name_or_path": str(path.absolute().parent), "gguf_file": path.name,
        "local_files_only": True, "trust_remote_code": False,
    }  # fmt: skip
    config: PretrainedConfig = AutoConfig.from_pretrained(**source)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    inspect_model(empty)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    reader = GGUFReader(path)
    model: Any
    if config.model_type in ARCHITECTURES:  # transformers makes gguf's table of names per module
        matrices, others = file_rows(reader, config, empty.state_dict())
        model = plain_model_of_rows(type(empty), matrices, others, config, _dtype(reader))
    else:
        model = AutoModelForCausalLM.from_pretrained(
            **source, config=config, dtype=_dtype(reader), **_dequantised()
        )
    size = sum(weight.numel() * weight.element_size() for weight in model.state_dict().values())
    on_bytes(f"writing {folder}", 0, size)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_WORK) as work:
        beside = Path(work) / "model"
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        about = {"file": str(path.absolute()), "transformers": transformers.__version__}
        (beside / _NAME).write_text(json.dumps(about), encoding="utf-8")
        beside.rename(folder)
    on_bytes(f"writing {folder}", size, size)


def _describe(path: Path, folder: Path) -> None:
    source: Any = {
        "pretrained_model_name_or_path": str(path.absolute().parent), "gguf_file": path.name,
        "local_files_only": True, "trust_remote_code": False,
    }  # fmt: skip
    config = AutoConfig.from_pretrained(**source)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_WORK) as work:
        beside = Path(work) / "model"
        config.save_pretrained(beside)
        AutoTokenizer.from_pretrained(**source).save_pretrained(beside)
        beside.rename(folder)


def _dtype(reader: Any) -> torch.dtype:
    """What the values are kept in."""
    kind = reader.get_field("general.file_type")
    return (
        torch.bfloat16 if kind is None else _PLAIN_TYPES.get(int(kind.contents()), torch.bfloat16)
    )


def _dequantised() -> dict[str, Any]:
    """What makes plain weights of it; releases before 5.24 do so anyway."""
    made = getattr(transformers, "GgufConfig", None)
    return {} if made is None else {"quantization_config": made(dequantize=True)}
