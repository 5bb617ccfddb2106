"""Load a model and its tokenizer by name or folder, and refuse at once what cannot be run."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from penstock.core.errors import (
    ConfigError,
    ModelLoadError,
    PenstockError,
    UnsupportedModelError,
)
from penstock.models.fetch import OnBytes
from penstock.models.first_look import UNSUPPORTED_DEVICES
from penstock.models.gguf_file import SUFFIX as GGUF
from penstock.models.gguf_file import architecture_of, converted_folder, described_folder
from penstock.models.hub import CONFIG, TOKENIZERS, HubModel
from penstock.models.known_model import KnownModel
from penstock.models.load_errors import said_of
from penstock.models.model_class import auto_class, generates_text, load_processor
from penstock.models.model_config import read_config
from penstock.models.model_shape import drop_idle_window, inspect_model
from penstock.models.packed.gguf_rows import ARCHITECTURES
from penstock.models.packed.kept import kept_model
from penstock.models.packed.sources import packed_source
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
WEIGHTS = {"int8": 8, "int4": 4}
"""Bits by the name that `load` takes."""
_OTHER_NAMES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A causal language model in evaluation mode, one that sees too or not, and the tokenizer that
    belongs to it."""

    model: CausalLM
    tokenizer: Tokenizer | None
    """None only for a model object that came without one; then prompts are token ids."""
    name: str
    """What the user called it: the bundled name, a released model's, a folder or GGUF file, or a
    name on the hub."""
    notices: tuple[str, ...] = ()
    """What a user should know of how it was loaded."""
    processor: Any = None
    """What prepares pictures and videos, for a model that takes them; None: it takes none."""
    known: KnownModel = field(default_factory=KnownModel, compare=False, repr=False)
    """What its caches have found out about the model."""


def load(
    name_or_path: str | Path = BUNDLED,
    *,
    dtype: torch.dtype | str | None = None,
    weights: str | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
    trust_remote_code: bool = False,
    on_bytes: OnBytes | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer, and for a model that sees, its processor.

    Args:
        name_or_path: "recall" (the bundled model, recall-2), the name of a released model that
            has been fetched, a folder that `save_pretrained` wrote, a GGUF file (dequantised once,
            and kept in the user's cache), or a name on the Hugging Face hub, which is looked for in
            the local cache first.
        dtype: of weights and KV cache: a torch dtype, its name ("half" and "float" too), or "auto"
            or None for as stored. Quantised weights stay what the folder's `quantization_config`
            says.
        weights: "int8" or "int4": packed into so many bits while they are read, for a CPU, and kept
            in the user's cache; 4 bits as `calibrate` finds best. None: as stored.
        device: where the model goes, "cpu" or "cuda" ("cuda:1").
        revision: of a name on the hub: a branch, a tag or a commit. None: "main".
        token: for the hub; None: the one of `hf auth login` or HF_TOKEN; False: none.
        offline: True: never ask the hub. None: ask, unless HF_HUB_OFFLINE is set.
        trust_remote_code: run Python code that comes with the model.
        on_bytes: called with what is being done, bytes done and bytes in all while files are
            fetched or converted.

    Raises:
        ModelLoadError: the folder is missing, incomplete or unreadable, the model needs code of
            its own, or its weights are no safetensors; or the hub has no such model, cannot be
            reached, or sent a damaged file.
        UnsupportedModelError: a tiered cache cannot work with it; says why.
        ConfigError: an unknown dtype, or a device that this machine does not have.
        StorageError: what was fetched cannot be written.
    """
    target = find_device(device)
    wanted = _dtype(dtype)
    bits = _bits(weights, target)
    name = str(name_or_path)
    hub = HubModel(
        name=name, revision=revision, token=token, offline=bool(offline), own_code=trust_remote_code
    )
    file = _packable_file(name) if bits else None
    folder, notices = _find_folder(hub, on_bytes or _unheard, file)
    config = _checked_config(folder, name, own_code=trust_remote_code)
    if not any((folder / file).is_file() for file in TOKENIZERS):
        raise ModelLoadError(f"{name}: the folder has no tokenizer files ({TOKENIZERS[0]})")
    with _as_load_error(name), _no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        source = packed_source(
            bits, target, file, folder=folder, config=config, dtype=wanted,
            own_code=trust_remote_code, on_bytes=on_bytes or _unheard, tokenizer=tokenizer,
        )  # fmt: skip
        model, kept = (
            (_read(folder, config, wanted, own_code=trust_remote_code), "")
            if source is None else kept_model(source)
        )  # fmt: skip
    model = model.to(target).eval()
    processor, said = load_processor(folder, config, own_code=trust_remote_code)
    notices = tuple(filter(None, (*notices, kept, *said)))
    return LoadedModel(
        model=model, tokenizer=tokenizer, name=name, notices=notices, processor=processor
    )


def fetch_hub_model(
    name: str, *, revision: str | None = None, token: str | bool | None = None,
    trust_remote_code: bool = False, on_bytes: OnBytes,
) -> Path:  # fmt: skip
    """Bring a model of the hub into the local cache, or what is new of it.

    Args:
        on_bytes: called with the progress.
        As for `load`.

    Returns:
        Its folder there.

    Raises:
        As `load`, and ConfigError where no model can be called that.
    """
    hub = HubModel(name=name, revision=revision, token=token, own_code=trust_remote_code)
    if not hub.is_possible:
        raise ConfigError(f"{name!r} can be no name of a model; write OWNER/NAME")
    return _fetch(hub, on_bytes)


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
    """A model's name for another day and another folder: the path of a folder or GGUF file in full,
    the name of a bundled, fetched or cached model as it is."""
    if name in (BUNDLED, BUNDLED_NAME):
        return name
    released = released_models().get(name)
    if released is not None and released.is_fetched:
        return name
    folder = Path(os.path.expanduser(name))
    is_file = folder.suffix.lower() == GGUF and os.path.isfile(folder)
    return str(folder.absolute()) if is_file or os.path.isfile(folder / CONFIG) else name


def _checked_config(folder: Path, name: str, *, own_code: bool) -> PretrainedConfig:
    """A folder's config; what cannot work is refused here, before any weights are read.

    Raises:
        ModelLoadError: config.json cannot be read, or the model needs code of its own.
        UnsupportedModelError: a tiered cache cannot work with it; says why.
    """
    config = read_config(folder, name, own_code=own_code)
    if not (own_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})):
        _require_causal(name, config)
    drop_idle_window(config)
    with _as_load_error(name), torch.device("meta"):
        inspect_model(auto_class(config).from_config(config, trust_remote_code=own_code))
    return config


@contextlib.contextmanager
def _as_load_error(name: str) -> Iterator[None]:
    """Put a model's name before errors of its own, and whatever else transformers raises."""
    try:
        yield
    except PenstockError as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        raise ModelLoadError(f"{name}: {said_of(error)}") from error


def _read(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype | str, *, own_code: bool
) -> CausalLM:
    model, info = auto_class(config).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=own_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"the weights are incomplete, {len(missing)} tensors are missing ({missing[0]}, ...)"
        )
    found: CausalLM = model
    return found


def _unheard(what: str, done: int, total: int) -> None:
    """Progress that is not shown."""


def _bits(weights: str | None, device: torch.device) -> int | None:
    if weights is None:
        return None
    if weights not in WEIGHTS:
        raise ConfigError(f"weights={weights!r} is not one of {', '.join(WEIGHTS)}")
    if device.type != "cpu":
        raise ConfigError(
            f"weights={weights!r} are for a CPU; leave it out on {device}, or give a model that "
            "was quantised for a GPU"
        )
    return WEIGHTS[weights]


def _packable_file(name: str) -> Path | None:
    """The GGUF file of a name, if its codes can be packed as they are; others are dequantised."""
    path = Path(os.path.expanduser(name))
    is_file = path.suffix.lower() == GGUF and os.path.isfile(path)
    return path if is_file and architecture_of(path) in ARCHITECTURES else None


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
    if target.type in UNSUPPORTED_DEVICES:
        raise ConfigError(f"device={target}: {UNSUPPORTED_DEVICES[target.type]}; write cpu")
    try:
        torch.empty(1, device=target)
    except Exception as error:  # of whatever kind a backend that is not there raises
        raise ConfigError(
            f"device={target}, but this machine (or this build of torch) has no such device; "
            "write cpu or cuda"
        ) from error
    return target


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    if dtype in (None, "auto"):
        return "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    known = _OTHER_NAMES.get(str(dtype), str(dtype))
    if known not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[known]


def _find_folder(
    hub: HubModel, on_bytes: OnBytes, file: Path | None = None
) -> tuple[Path, tuple[str, ...]]:
    """The folder that a name stands for, and what to report of it.

    It is ours, the user's, one that a GGUF file became, one in the hub's cache, or the hub's.

    Args:
        file: a GGUF file whose weights are read from itself.
    """
    name = hub.name
    if file is not None:
        with _as_load_error(name):
            return described_folder(file, on_bytes), ()
    if name in (BUNDLED, BUNDLED_NAME):
        return Path(__file__).parent / BUNDLED, ()
    released = released_models().get(name)
    if released is not None and released.is_fetched:
        return released.folder, ()
    # For any name: `Path`'s own raise for a home that is not there, or a name that is too long.
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        if not os.path.isfile(folder / CONFIG):
            raise ModelLoadError(f"{name}: the folder has no config.json, so it holds no model")
        return folder, ()
    if os.path.isfile(folder) and folder.suffix.lower() == GGUF:
        with _as_load_error(name), _no_progress_bars():
            converted, notice = converted_folder(folder, on_bytes)
        return converted, (notice,) if notice else ()
    if os.path.exists(folder):
        raise ModelLoadError(
            f"{name} is a file; give the folder that holds config.json, or a {GGUF} file"
        )
    if released is not None:
        raise ModelLoadError(
            f"{name} has not been fetched; run: penstock fetch {name} (or train it: "
            f"{released.train})"
        )
    return _find_on_hub(hub, on_bytes), ()


def _find_on_hub(hub: HubModel, on_bytes: OnBytes) -> Path:
    """The folder of a name in the hub's cache; what is not whole there is fetched."""
    cached = hub.cached_folder() if hub.is_possible else None
    missing = None if cached is None else hub.missing_part(cached)
    if cached is not None and missing is None:
        return cached
    if hub.is_possible and not hub.is_offline:
        return _fetch(hub, on_bytes)
    if missing is not None:
        raise ModelLoadError(
            f"{hub.name} is not whole in the local Hugging Face cache ({missing} is missing); with "
            f"a network, run: {hub.fetch_command}"
        )
    fetch = f"with a network, run: {hub.fetch_command}; or " if hub.is_possible else ""
    raise ModelLoadError(
        f"there is no model folder {hub.name}, and no model of that name in the local Hugging "
        f"Face cache; {fetch}give a folder with config.json, or {BUNDLED!r} for the bundled model"
    )


def _fetch(hub: HubModel, on_bytes: OnBytes) -> Path:
    def check(folder: Path) -> None:
        _checked_config(folder, hub.name, own_code=hub.own_code)

    return hub.fetch(check, on_bytes)


def _require_causal(name: str, config: PretrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) is an encoder-decoder; only decoders have the growing "
            "KV cache that this library keeps on disk"
        )
    if not generates_text(config):
        raise UnsupportedModelError(f"{name} ({config.model_type}) is no causal language model")
