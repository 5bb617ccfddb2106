"""LowRankAdapter: per-layer bases for low-rank keys, fitted by SVD, kept as safetensors."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.core.errors import AdapterError, ConfigError

FORMAT = "penstock-adapter-1"


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """Basis of one layer's joint-head keys and the spread of the projected components.

    The spread serves quantisation: components are stored as steps of their standard deviation
    around their mean. The mean never matters for ranking (it adds the same to every token).
    """

    basis: Tensor
    """Orthonormal columns, strongest first, float32. [kv_heads * head_dim, rank]"""
    mean: Tensor
    """Mean of each component, float32. [rank]"""
    std: Tensor
    """Standard deviation of each component, float32. [rank]"""

    @property
    def rank(self) -> int:
        """Number of components."""
        return self.basis.shape[1]

    def truncated(self, rank: int) -> "LayerAdapter":
        """The strongest `rank` components."""
        return LayerAdapter(self.basis[:, :rank], self.mean[:rank], self.std[:rank])


def fit_layer(second_moment: Tensor, mean_key: Tensor, rank: int) -> LayerAdapter:
    """Fit one layer's basis: the top right singular vectors of the flattened keys (KVSwap 3.2).

    The right singular vectors of K are the eigenvectors of its Gram matrix, which can be summed
    over any number of tokens in constant memory.

    Args:
        second_moment: K^T K / tokens, float64 or float32. [joint_dim, joint_dim]
        mean_key: mean of the keys. [joint_dim]
        rank: components to keep.
    """
    moment = second_moment.double()
    _, vectors = torch.linalg.eigh(moment)
    basis = vectors.flip(1)[:, :rank]
    mean = mean_key.double() @ basis
    variance = (basis * (moment @ basis)).sum(dim=0) - mean.square()
    std = variance.clamp_min(1e-12).sqrt()
    return LayerAdapter(basis.float().contiguous(), mean.float(), std.float())


@dataclass(frozen=True, slots=True)
class LowRankAdapter:
    """Bases of all tiered layers of one model."""

    layers: list[LayerAdapter]
    fingerprint: str
    """Of the model that it was fitted to."""
    tokens: int
    """Calibration tokens it was fitted to."""

    @property
    def rank(self) -> int:
        """Components that every layer has."""
        return min(layer.rank for layer in self.layers)

    def save(self, path: str | Path) -> None:
        """Write the adapter as safetensors, the fingerprint in its metadata."""
        tensors = {}
        for i, layer in enumerate(self.layers):
            tensors[f"layers.{i}.basis"] = layer.basis.contiguous()
            tensors[f"layers.{i}.mean"] = layer.mean.contiguous()
            tensors[f"layers.{i}.std"] = layer.std.contiguous()
        metadata = {
            "format": FORMAT, "fingerprint": self.fingerprint, "tokens": str(self.tokens),
            "layers": str(len(self.layers)),
        }  # fmt: skip
        save_file(tensors, path, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> "LowRankAdapter":
        """Read an adapter.

        Raises:
            AdapterError: the file is missing, unreadable, or not an adapter.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise AdapterError(f"{path} is not a Penstock adapter")
                layers = [
                    LayerAdapter(
                        *(file.get_tensor(f"layers.{i}.{part}") for part in ("basis", "mean", "std"))
                    )
                    for i in range(int(metadata["layers"]))
                ]
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise AdapterError(f"cannot read the adapter {path}: {error}") from error
        return cls(layers, metadata["fingerprint"], int(metadata["tokens"]))

    def check(self, fingerprint: str, num_layers: int, joint_dim: int) -> None:
        """Refuse an adapter of another model.

        Raises:
            AdapterError: it was fitted to a model with other weights or shapes.
        """
        if self.fingerprint != fingerprint:
            raise AdapterError(
                f"the adapter was made for another model (fingerprint {self.fingerprint[:12]}, this "
                f"model has {fingerprint[:12]}); make one with `penstock calibrate`"
            )
        shapes = {layer.basis.shape[0] for layer in self.layers}
        if len(self.layers) != num_layers or shapes != {joint_dim}:
            raise AdapterError(
                f"the adapter has {len(self.layers)} layers of key width {shapes}, the model "
                f"{num_layers} of {joint_dim}"
            )
