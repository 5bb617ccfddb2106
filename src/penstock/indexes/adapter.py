"""LowRankAdapter: per-layer bases for low-rank keys, fitted by SVD, kept as safetensors."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from penstock.core.errors import AdapterError, ConfigError

FORMAT = "penstock-adapter-1"


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """Basis of one layer's joint-head keys, and the range of the projected components."""

    basis: Tensor
    """Orthonormal columns, strongest first, float32. [kv_heads * head_dim, rank]"""
    peak: Tensor
    """Largest magnitude of each component, float32; the range of quantised codes. [rank]"""

    @property
    def rank(self) -> int:
        """Number of components."""
        return self.basis.shape[1]

    def truncated(self, rank: int) -> "LayerAdapter":
        """The strongest `rank` components."""
        return LayerAdapter(self.basis[:, :rank], self.peak[:rank])


def fit_basis(second_moment: Tensor, rank: int) -> Tensor:
    """Fit one layer's basis: the top right singular vectors of the flattened keys (KVSwap 3.2).

    The right singular vectors of K are the eigenvectors of its Gram matrix, which can be summed
    over any number of tokens in constant memory. Keys are not centred, as in the paper; centring
    them lost 20 to 30 points on the bundled model (docs/log.md).

    Args:
        second_moment: K^T K. [joint_dim, joint_dim]
        rank: components to keep.

    Returns:
        float32 [joint_dim, rank]
    """
    _, vectors = torch.linalg.eigh(second_moment.double())
    basis: Tensor = vectors.flip(1)[:, :rank].float().contiguous()
    return basis


def fit_layer(keys: Tensor, rank: int) -> LayerAdapter:
    """Fit one layer to a sample of keys. keys: [tokens, joint_dim]."""
    flat = keys.float()
    basis = fit_basis(flat.T @ flat, rank)
    return LayerAdapter(basis, (flat @ basis).abs().amax(dim=0))


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

    @property
    def rank(self) -> int:
        """Components that every layer has."""
        return min(layer.rank for layer in self.layers)

    def save(self, path: str | Path) -> None:
        """Write the adapter as safetensors, the fingerprint in its metadata."""
        tensors = {}
        for i, layer in enumerate(self.layers):
            tensors[f"layers.{i}.basis"] = layer.basis.contiguous()
            tensors[f"layers.{i}.peak"] = layer.peak.contiguous()
        tensors["prediction_cosine"] = torch.tensor(self.prediction_cosine, dtype=torch.float32)
        metadata = {
            "format": FORMAT, "fingerprint": self.fingerprint, "tokens": str(self.tokens),
            "layers": str(len(self.layers)),
        }  # fmt: skip
        # save_file would make a file that only its owner can read.
        Path(path).write_bytes(save(tensors, metadata=metadata))

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
                parts = ("basis", "peak")
                layers = [
                    LayerAdapter(*(file.get_tensor(f"layers.{i}.{part}") for part in parts))
                    for i in range(int(metadata["layers"]))
                ]
                cosine = tuple(file.get_tensor("prediction_cosine").tolist())
            return cls(layers, metadata["fingerprint"], int(metadata["tokens"]), cosine)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise AdapterError(f"cannot read the adapter {path}: {error}") from error

    def check(self, fingerprint: str, num_layers: int, joint_dim: int) -> None:
        """Refuse an adapter of another model.

        Raises:
            AdapterError: it was fitted to a model with other weights or shapes.
        """
        if self.fingerprint != fingerprint:
            raise AdapterError(
                f"the adapter was made for another model (fingerprint {self.fingerprint[:12]}, "
                f"this model has {fingerprint[:12]}); make one with `penstock calibrate`"
            )
        shapes = {layer.basis.shape[0] for layer in self.layers}
        if len(self.layers) != num_layers or shapes != {joint_dim}:
            raise AdapterError(
                f"the adapter has {len(self.layers)} layers of key width {shapes}, the model "
                f"{num_layers} of {joint_dim}"
            )
