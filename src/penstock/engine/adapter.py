"""LowRankAdapter: per-layer bases for low-rank keys, fitted by SVD, kept as safetensors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from penstock.core.atomic_write import FileKind, write_atomically
from penstock.core.errors import AdapterError, ConfigError
from penstock.core.regular_file import open_regular
from penstock.engine.rank_shares import UNIT, shared_ranks

FORMAT = "penstock-adapter-1"
BLOCK_FORMAT = "penstock-adapter-2"
"""Of bases of keys that are turned back by blocks, which a reader of the first would misread."""
FORMATS = (FORMAT, BLOCK_FORMAT)
_HEADER_BYTES_MAX = 100 << 20
"""Of a safetensors file, as its own readers have it."""
_AGAIN = "make it again with `penstock calibrate`"
_MOST_BLOCK_TOKENS = 1 << 20
_LONGEST = 1.005
"""Of a component of a column of length 1, rounded."""
_LEAST_SCALE = 1e-4
"""Scales are about 1."""


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """Basis of one layer's joint-head keys, and the range of the projected components."""

    basis: Tensor
    """Orthonormal columns, strongest first, float32. [kv_heads * head_dim, rank]"""
    peak: Tensor
    """Largest magnitude of each component, float32; the range of quantised codes. [rank]"""
    ranks: tuple[int, ...] = ()
    """This layer's share when the layers have 1, 2, ... components on average; empty: as many."""
    block_tokens: int = 0
    """The keys that it is of are turned back to their offset in a block of so many tokens; 0: keys
    as the model has them."""
    scale: Tensor | None = None
    """What those keys are multiplied by, and queries divided by, before (`key_scale`); None: by
    nothing. float32 [kv_heads * head_dim]"""

    @property
    def rank(self) -> int:
        """Number of components."""
        return self.basis.shape[1]

    def rank_at(self, mean: int) -> int:
        """This layer's components when the layers have `mean` on average."""
        return self.ranks[mean - 1] if self.ranks else mean

    def truncated(self, rank: int) -> "LayerAdapter":
        """The strongest `rank` components."""
        return replace(self, basis=self.basis[:, :rank], peak=self.peak[:rank], ranks=())


def fit_basis(second_moment: Tensor, rank: int) -> Tensor:
    """Fit one layer's basis: the top right singular vectors of the flattened keys (KVSwap 3.2).

    The right singular vectors of K are the eigenvectors of its Gram matrix, which can be summed
    over any number of tokens in constant memory. Keys are not centred, as in the paper; centring
    them lost 20 to 30 points on the bundled model
    (research/notes/2026-11-20-index-on-recall-7m.md).

    Args:
        second_moment: K^T K. [joint_dim, joint_dim]
        rank: components to keep.

    Returns:
        float32 [joint_dim, rank]
    """
    _, vectors = torch.linalg.eigh(second_moment.double())
    basis: Tensor = vectors.flip(1)[:, :rank].float().contiguous()
    return basis


def fit_layer(
    keys: Tensor, rank: int, block_tokens: int = 0, scale: Tensor | None = None
) -> LayerAdapter:
    """Fit one layer to a sample of keys.

    Args:
        keys: turned back already where they are of blocks. [tokens, joint_dim]
        scale: see `LayerAdapter`.
    """
    flat = keys.float() if scale is None else keys.float() * scale
    basis = fit_basis(flat.T @ flat, rank)
    peak = (flat @ basis).abs().amax(dim=0)
    return LayerAdapter(basis, peak, block_tokens=block_tokens, scale=scale)


@dataclass(frozen=True, slots=True)
class LowRankAdapter:
    """Bases of all tiered layers of one model."""

    layers: list[LayerAdapter]
    fingerprint: str
    """Of the model that it was fitted to."""
    tokens: int
    """Calibration tokens it was fitted to."""
    prediction_cosine: tuple[float, ...] = ()
    """Per layer, the mean cosine of its true query and the one predicted from the layer before;
    empty when it was not measured."""
    selection_cost: tuple[tuple[float, ...], ...] = ()
    """Per layer, what choosing tokens by 8, 16, ... components costs, in nats a token
    (`models/rank_meter.py`); empty when it was not measured."""
    origin: str = ""
    """The file that it was read from; empty where it was made here."""

    @property
    def rank(self) -> int:
        """Components that every layer has."""
        return min(layer.rank for layer in self.layers)

    @property
    def block_tokens(self) -> int:
        """Of the layers' blocks; 0 where all layers' keys are as the model has them."""
        return max(layer.block_tokens for layer in self.layers)

    def shared_layers(self) -> list[LayerAdapter]:
        """The layers, each with its share of every mean rank where what it needs was measured."""
        if not self.selection_cost:
            return self.layers
        by_mean = shared_ranks(self.selection_cost, self.rank)
        return [
            replace(layer, ranks=tuple(ranks[i] for ranks in by_mean))
            for i, layer in enumerate(self.layers)
        ]

    def widest_ranks(self) -> tuple[int, ...]:
        """Most components that a layer has in `shared_layers`, for each mean rank."""
        return widest_ranks(self.shared_layers())

    def save(self, path: str | Path) -> None:
        """Write the adapter as safetensors, the fingerprint in its metadata."""
        tensors = {}
        for i, layer in enumerate(self.layers):
            tensors[f"layers.{i}.basis"] = layer.basis.contiguous()
            tensors[f"layers.{i}.peak"] = layer.peak.contiguous()
            if layer.scale is not None:
                tensors[f"layers.{i}.scale"] = layer.scale.contiguous()
        tensors["prediction_cosine"] = torch.tensor(self.prediction_cosine, dtype=torch.float32)
        if self.selection_cost:
            tensors["selection_cost"] = torch.tensor(self.selection_cost, dtype=torch.float32)
        blocks = [layer.block_tokens for layer in self.layers]
        if any(blocks):
            tensors["block_tokens"] = torch.tensor(blocks, dtype=torch.int64)
        metadata = {
            "format": BLOCK_FORMAT if any(blocks) else FORMAT,
            "fingerprint": self.fingerprint, "tokens": str(self.tokens),
            "layers": str(len(self.layers)),
        }  # fmt: skip
        # save_file would make a file that only its owner can read.
        write_atomically(save(tensors, metadata=metadata), Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "LowRankAdapter":
        """Read an adapter.

        Raises:
            AdapterError: the file is missing, unreadable, or not an adapter; what it holds does not
                belong together, or is not finite.
        """
        try:
            open_regular(path).close()  # the library would wait for who writes into a pipe
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") not in FORMATS:
                    raise AdapterError(f"{path} is not a Penstock adapter")
                count = int(metadata["layers"])
                blocks = _blocks(file, count, path) if metadata["format"] != FORMAT else [0] * count
                layers = [
                    LayerAdapter(
                        file.get_tensor(f"layers.{i}.basis"), file.get_tensor(f"layers.{i}.peak"),
                        block_tokens=blocks[i], scale=_scale(file, i, blocks[i]),
                    )
                    for i in range(count)
                ]  # fmt: skip
                _require_layers(layers, path)
                cosine = _row(file, "prediction_cosine", len(layers), path)
                error = _rows(file, "selection_cost")
                _require_measured(error, layers, path)
            tokens = int(metadata["tokens"])
            return cls(layers, metadata["fingerprint"], tokens, cosine, error, str(path))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise AdapterError(f"cannot read the adapter {path}: {error}") from error

    def check(self, fingerprint: str, num_layers: int, joint_dim: int) -> None:
        """Refuse an adapter of another model.

        Raises:
            AdapterError: it was fitted to a model with other weights or shapes, or a layer's basis
                and peak do not belong together.
        """
        if self.fingerprint != fingerprint:
            raise AdapterError(
                f"the adapter was made for another model (fingerprint {self.fingerprint[:12]}, "
                f"this model has {fingerprint[:12]}); make one with `penstock calibrate`"
            )
        for i, layer in enumerate(self.layers):
            if fault := _layer_fault(layer):
                raise AdapterError(f"layer {i} of the adapter: {fault}; {_AGAIN}")
        shapes = {layer.basis.shape[0] for layer in self.layers}
        if len(self.layers) != num_layers or shapes != {joint_dim}:
            raise AdapterError(
                f"the adapter has {len(self.layers)} layers of key width {shapes}, the model "
                f"{num_layers} of {joint_dim}"
            )


def basis_fault(basis: Tensor, scale: Tensor) -> str | None:
    """What is wrong with a basis and a number for each of its components, in words.

    Kernels read both by the basis's shape, so that neither may be handed on before this.

    Args:
        basis: orthonormal columns, float32. [joint_dim, rank]
        scale: the components' range, or a step of it; float32. [rank]

    Returns:
        None where nothing is wrong.
    """
    if basis.ndim != 2 or not 0 < basis.shape[1] <= basis.shape[0]:
        return f"a basis cannot have the shape {list(basis.shape)}"
    if scale.shape != basis.shape[1:]:
        return f"{list(scale.shape)} numbers do not belong to a basis {list(basis.shape)}"
    if not basis.dtype == scale.dtype == torch.float32:
        return f"a basis in {basis.dtype} with {scale.dtype} is not float32"
    # A column of length 1 has no component above 1, nor one that is not a number.
    if not bool((basis.abs() <= _LONGEST).all()):
        return "the columns of the basis are not of length 1"
    if not bool(((scale >= 0) & scale.square().isfinite()).all()):
        return "a component's range is negative, not finite, or too large"
    return None


def scale_fault(scale: Tensor | None, joint_dim: int) -> str | None:
    """What is wrong with a scale of keys, in words; None where nothing is."""
    if scale is None:
        return None
    if scale.shape != (joint_dim,) or scale.dtype != torch.float32:
        return f"a scale {list(scale.shape)} in {scale.dtype} is not of {joint_dim} in float32"
    if not bool(((scale > _LEAST_SCALE) & (scale < 1 / _LEAST_SCALE)).all()):
        return "a scale is not positive, not finite, or far from 1"
    return None


def _layer_fault(layer: LayerAdapter) -> str | None:
    fault = basis_fault(layer.basis, layer.peak)
    return fault or scale_fault(layer.scale, len(layer.basis))


def widest_ranks(layers: Sequence[LayerAdapter]) -> tuple[int, ...]:
    """The largest share of a layer for every mean rank; empty where all layers have the same."""
    return tuple(map(max, zip(*(layer.ranks for layer in layers), strict=True)))


def _require_layers(layers: Sequence[LayerAdapter], path: str | Path) -> None:
    """Refuse layers that no kernel may see, or that are not of one model."""
    if not layers:
        raise AdapterError(f"{path} has no layers; {_AGAIN}")
    for i, layer in enumerate(layers):
        if fault := _layer_fault(layer):
            raise AdapterError(f"{path}, layer {i}: {fault}; {_AGAIN}")
    if len({layer.basis.shape[0] for layer in layers}) > 1:
        raise AdapterError(f"{path} has layers of several key widths; {_AGAIN}")


def _require_measured(
    error: tuple[tuple[float, ...], ...], layers: Sequence[LayerAdapter], path: str | Path
) -> None:
    """Refuse measurements that are not of these layers, or no numbers."""
    units = min(layer.rank for layer in layers) // UNIT
    rows = [len(row) for row in error]
    if error and (rows != [units] * len(layers) or not np.isfinite(error).all()):
        raise AdapterError(
            f"{path} should have the error of {len(layers)} layers at {units} ranks; {_AGAIN}"
        )


def _row(file: Any, name: str, count: int, path: str | Path) -> tuple[float, ...]:
    """One number a layer of an open file; none where nothing was measured."""
    found = file.get_tensor(name)
    if found.shape not in {(count,), (0,)} or not bool(found.isfinite().all()):
        raise AdapterError(
            f"{path}: {name} should have a number for each of {count} layers; {_AGAIN}"
        )
    return tuple(found.tolist())


def _blocks(file: Any, count: int, path: str | Path) -> list[int]:
    """Tokens of each layer's blocks; layers without a rotation have none."""
    found = file.get_tensor("block_tokens")
    numbers: list[int] = found.tolist() if found.dtype == torch.int64 else []
    sizes = {size for size in numbers if size}
    if found.shape != (count,) or len(sizes) != 1 or not 0 < min(sizes) <= _MOST_BLOCK_TOKENS:
        raise AdapterError(
            f"{path}: block_tokens should be one number of tokens, or none, for each of {count} "
            f"layers; {_AGAIN}"
        )
    return numbers


def _scale(file: Any, layer: int, block_tokens: int) -> Tensor | None:
    """A layer's, where there is one: only keys by blocks have some."""
    name = f"layers.{layer}.scale"
    found: Tensor | None = None
    if block_tokens and name in set(file.keys()):
        found = file.get_tensor(name)
    return found


def _rows(file: Any, name: str) -> tuple[tuple[float, ...], ...]:
    """A matrix of an open file, row by row; nothing where there is none."""
    if name not in set(file.keys()):
        return ()
    found = file.get_tensor(name)
    if found.ndim != 2 or found.dtype != torch.float32:
        raise ValueError(f"{name} is no matrix of float32")
    return tuple(map(tuple, found.tolist()))


def _is_adapter(file: BinaryIO) -> bool:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(size, _HEADER_BYTES_MAX)))
    return header["__metadata__"]["format"] in FORMATS


ADAPTER = FileKind("adapter of penstock", _is_adapter)
