"""Load a model and its tokenizer from a folder, and refuse at once what cannot be run."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from penstock.core.errors import (
    ConfigError,
    ModelLoadError,
    PenstockError,
    UnsupportedModelError,
)
from penstock.models.load_errors import said_of
from penstock.models.model_config import read_config
from penstock.models.model_shape import drop_idle_window, inspect_model
from penstock.models.released import BUNDLED_NAME, released_models

BUNDLED = "recall"
"""Name of the model that comes with the package."""

CausalLM: TypeAlias = PreTrainedModel
Tokenizer: TypeAlias = PreTrainedTokenizerBase

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A causal language model in evaluation mode, and the tokenizer that belongs to it."""

    model: CausalLM
    tokenizer: Tokenizer | None
    """None only for a model object that came without one; then prompts are token ids."""
    name: str
    """What the user called it: the bundled name, a released model's, a folder, or a name in the
    local cache."""


def load(
    name_or_path: str | Path = BUNDLED,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a model and its tokenizer. Never touches the network.

    Args:
        name_or_path: "recall" (the bundled model, recall-2), the name of a released model that
            has been fetched, a folder that `save_pretrained` wrote, or the name of a model that
            already lies in the local Hugging Face cache.
        dtype: weights and KV cache; a torch dtype or its name. None: as stored.
        device: where the model goes, "cpu" or "cuda" ("cuda:1").

    Raises:
        ModelLoadError: the folder is missing, incomplete or unreadable, or the model needs code of
            its own.
        UnsupportedModelError: a tiered cache cannot work with it; says why.
        ConfigError: an unknown dtype, or a device that this machine does not have.
    """
    target = find_device(device)
    wanted = _dtype(dtype)
    name = str(name_or_path)
    folder = _find_folder(name)
    config = read_config(folder, name)
    _require_causal(name, config)
    drop_idle_window(config)
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelLoadError(f"{name}: the folder has no tokenizer files ({_TOKENIZER_FILES[0]})")
    try:
        with _no_progress_bars():
            tokenizer, model = _read(folder, config, wanted)
    except PenstockError as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        raise ModelLoadError(f"{name}: {said_of(error)}") from error
    return LoadedModel(model=model.to(target).eval(), tokenizer=tokenizer, name=name)


def check_own_tokenizer(model: object, tokenizer: object) -> None:
    """Refuse a tokenizer beside a model that has one, which would be left unused.

    Raises:
        ConfigError: says what a tokenizer is for.
    """
    if tokenizer is not None and isinstance(model, LoadedModel | str | Path):
        raise ConfigError(
            "tokenizer is for a transformers model alone: a folder, a name and what load() "
            "returned have their own"
        )


def lasting_name(name: str) -> str:
    """A model's name for another day and another folder: the path of a folder in full, the name
    of a bundled, fetched or cached model as it is."""
    if name in (BUNDLED, BUNDLED_NAME):
        return name
    released = released_models().get(name)
    if released is not None and released.is_fetched:
        return name
    folder = Path(os.path.expanduser(name))
    return str(folder.absolute()) if os.path.isfile(folder / "config.json") else name


def _read(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype | str
) -> tuple[Tokenizer, CausalLM]:
    # Built without memory first: what cannot work is refused before its weights are read.
    with torch.device("meta"):
        inspect_model(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"the weights are incomplete, {len(missing)} tensors are missing ({missing[0]}, ...)"
        )
    return tokenizer, model


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing on the terminal while it reads weights."""
    if not hf_logging.is_progress_bar_enabled():
        yield
        return
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.enable_progress_bar()


def find_device(device: torch.device | str) -> torch.device:
    """The device of a name.

    Raises:
        ConfigError: it is no name of a device, or this machine has no such device.
    """
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not a device; write cpu or cuda") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but this machine (or this build of torch) has no CUDA GPU")
    if target.type == "meta":
        raise ConfigError("device=meta computes nothing; write cpu or cuda")
    try:
        torch.empty(1, device=target)
    except Exception as error:  # of whatever kind a backend that is not there raises
        raise ConfigError(
            f"device={target}, but this machine (or this build of torch) has no such device; "
            "write cpu or cuda"
        ) from error
    return target


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    if dtype is None:
        return "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _find_folder(name: str) -> Path:
    """The folder that `name` stands for; a hub name is looked up in the local cache only."""
    if name in (BUNDLED, BUNDLED_NAME):
        return Path(__file__).parent / BUNDLED
    released = released_models().get(name)
    if released is not None and released.is_fetched:
        return released.folder
    # For any name: `Path`'s own raise for a home that is not there, or a name that is too long.
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        if not os.path.isfile(folder / "config.json"):
            raise ModelLoadError(f"{name}: the folder has no config.json, so it holds no model")
        return folder
    if os.path.exists(folder):
        raise ModelLoadError(f"{name} is a file; give the folder that holds config.json")
    if released is not None:
        raise ModelLoadError(
            f"{name} has not been fetched; run: penstock fetch {name} (or train it: "
            f"{released.train})"
        )
    try:
        cached = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        cached = None
    if cached is None:
        raise ModelLoadError(
            f"there is no model folder {name}, and no model of that name in the local Hugging "
            f"Face cache; give a folder with config.json, or {BUNDLED!r} for the bundled model"
        )
    return Path(cached).parent


def _require_causal(name: str, config: PretrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) is an encoder-decoder; only decoders have the growing "
            "KV cache that this library keeps on disk"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{name} ({config.model_type}) is no causal language model")
