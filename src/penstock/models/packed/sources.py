"""What packed weights are made of: a plain folder, one of GPTQ or AWQ, a GGUF file."""

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import override

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.packed_weights import packing
from penstock.models.fetch import OnBytes
from penstock.models.model_class import auto_class
from penstock.models.packed.calibration import Calibrated, calibrate, calibration_pieces
from penstock.models.packed.gguf_rows import file_rows
from penstock.models.packed.gptq import METHODS, check_readable, folder_rows
from penstock.models.packed.quantizer import PackedConfig
from penstock.models.packed.rows import model_of_rows

FORMAT = 6
"""Of packed weights in a file, and of how they are chosen."""


@dataclass(frozen=True, kw_only=True)
class PackedSource:
    """A model folder with plain weights, and how they are to be packed."""

    folder: Path
    config: PretrainedConfig
    dtype: torch.dtype | str
    bits: int
    own_code: bool
    on_bytes: OnBytes
    tokenizer: Any = None
    """Reads the texts that ship, by which 4 bits are chosen; None: each weight counts the same."""

    def make(self) -> PreTrainedModel:
        """Read and pack the weights, in memory; one plain parameter is there at a time.

        For 4 bits texts go through the plain model first, whose weights are mapped.

        Raises:
            ModelLoadError: some are missing.
        """
        packed = PackedConfig(self.bits)
        if self._pieces:
            found = self._calibrated(self._pieces)
            packed.importance, packed.forms = found.importance, found.forms
        packed.on_packed = self._counted(self.folder.glob("*.safetensors"))
        return loaded(
            self.folder, copy.deepcopy(self.config), self.dtype, packed, own_code=self.own_code
        )

    @property
    def name(self) -> str:
        """What it is called in the cache."""
        return self.folder.name

    @property
    def key(self) -> str:
        """Changes with the weights, the bits, and whatever else the file depends on."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update((self.folder / "config.json").read_bytes())
        for path in sorted(self.folder.glob("*.safetensors*")):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        versions = (torch.__version__, transformers.__version__)
        digest.update(repr((FORMAT, self.bits, str(self.dtype), packing(), versions)).encode())
        for piece in self._pieces:
            digest.update(piece.numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def _pieces(self) -> list[Tensor]:
        return calibration_pieces(self.tokenizer, self.config) if self.bits == 4 else []

    def _calibrated(self, pieces: list[Tensor]) -> Calibrated:
        plain = loaded(
            self.folder, copy.deepcopy(self.config), self.dtype, None, own_code=self.own_code
        )
        with torch.device("meta"):
            empty = auto_class(self.config).from_config(
                self.config, dtype=plain.dtype, trust_remote_code=self.own_code
            )
        size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        said = f"choosing 4 bits of {self.name} by text"
        return calibrate(
            plain, empty, pieces,
            lambda done, steps: self.on_bytes(said, size * done // steps, size),
        )  # fmt: skip

    def _counted(self, files: Any) -> "_Counted":
        total = sum(path.stat().st_size for path in files)
        return _Counted(f"packing {self.name}", total, self.on_bytes)

    @property
    def _plain_dtype(self) -> torch.dtype:
        """Of what is not packed: bfloat16 where nothing else was asked, as CPUs compute in it."""
        return self.dtype if isinstance(self.dtype, torch.dtype) else torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class CodedFolder(PackedSource):
    """A folder of GPTQ or AWQ: its codes are kept as they are, what is plain in it in 8 bits."""

    said: Mapping[str, Any]
    """Its `quantization_config`."""

    @cached_property
    @override
    def _pieces(self) -> list[Tensor]:
        return []

    @override
    def make(self) -> PreTrainedModel:
        config = copy.deepcopy(self.config)
        packed = PackedConfig(self.bits, origin=str(self.said.get("quant_method")))
        packed.on_packed = self._counted(self.folder.glob("*.safetensors"))
        matrices, others = folder_rows(self.folder, self.said)
        return model_of_rows(matrices, others, config, packed, self._plain_dtype)


@dataclass(frozen=True, kw_only=True)
class GgufFile(PackedSource):
    """A GGUF file: its 4- and 8-bit codes are kept as they are, all else is packed by rows."""

    file: Path

    @cached_property
    @override
    def _pieces(self) -> list[Tensor]:
        return []

    @property
    @override
    def name(self) -> str:
        return self.file.stem

    @override
    def make(self) -> PreTrainedModel:
        from gguf import GGUFReader

        config = copy.deepcopy(self.config)
        packed = PackedConfig(self.bits, origin="gguf")
        packed.on_packed = self._counted([self.file])
        with torch.device("meta"):
            names = list(auto_class(config).from_config(config).state_dict())
        matrices, others = file_rows(GGUFReader(self.file), config, names)
        return model_of_rows(matrices, others, config, packed, self._plain_dtype)


def packed_source(
    bits: int | None, device: torch.device, file: Path | None, **known: Any
) -> PackedSource | None:
    """What packed weights are made of; None: the model is loaded as it is stored.

    Args:
        bits: that were asked for; None: as stored. GPTQ's and AWQ's weights are packed on a CPU
            then too, as nothing else reads them there.
        file: a GGUF file; None: the folder has the weights.
        known: fields of `PackedSource`.

    Raises:
        ConfigError: bits were asked for, and the weights are quantised already.
        UnsupportedModelError: they are quantised in a way that is not read.
    """
    said = getattr(known["config"], "quantization_config", None)
    if file is not None and bits is not None:
        return GgufFile(bits=bits, file=file, **known)
    method = said.get("quant_method") if isinstance(said, dict) else said
    if bits is not None and said is not None:
        raise ConfigError(
            f"its weights are quantised already ({method}); leave weights='int{bits}' out, or take "
            "the model before it was"
        )
    if bits is not None:
        return PackedSource(bits=bits, **known)
    if method in METHODS and device.type == "cpu" and isinstance(said, dict):
        check_readable(said)
        known["config"] = plain = copy.deepcopy(known["config"])
        del plain.quantization_config
        return CodedFolder(bits=4, said=said, **known)
    return None


def loaded(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype | str, packed: PackedConfig | None,
    *, own_code: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """A folder's model as transformers loads it.

    Args:
        packed: how to pack it; None: it is packed, as `config.quantization_config` says, or plain.

    Raises:
        ModelLoadError: weights are missing.
    """
    asked = {} if packed is None else {"quantization_config": packed}
    model, info = auto_class(config).from_pretrained(
        folder, config=config, dtype=dtype, local_files_only=True, use_safetensors=True,
        trust_remote_code=own_code, output_loading_info=True, **asked,
    )  # fmt: skip
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"the weights are incomplete, {len(missing)} tensors are missing ({missing[0]}, ...)"
        )
    made = getattr(model.config, "quantization_config", None)
    if isinstance(made, PackedConfig):
        made.on_packed, made.importance = None, {}
    found: PreTrainedModel = model.eval()
    return found


@dataclass
class _Counted:
    """Progress of packing."""

    what: str
    total: int
    on_bytes: OnBytes
    done: int = 0

    def __deepcopy__(self, _: dict[int, Any]) -> "_Counted":
        """Transformers copies the config that it is in; a progress display is no value to copy."""
        return self

    def __call__(self, weight: Tensor) -> None:
        self.done = min(self.done + weight.nbytes, self.total)
        self.on_bytes(self.what, self.done, self.total)
