"""Where KV lies, computed from sizes: GPU memory, then host memory, then storage; and Locality."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import ConfigError
from research.near_storage.smartssd_constants import Constants, Shape


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A decode step of a batch."""

    shape: Shape
    tokens: int
    """Context of one sequence."""
    batch: int = 8
    alpha: float = 0.2

    @property
    def layer_tokens(self) -> int:
        """Tokens of all sequences in one layer."""
        return self.batch * self.tokens

    @property
    def kv_bytes(self) -> float:
        """Of the whole cache."""
        return self.layer_tokens * self.shape.layers * self.shape.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Places:
    """Tokens of a layer by where their KV lies; storage holds what nothing else has room for."""

    gpu: int
    host: int
    storage: int

    @property
    def total(self) -> int:
        """All tokens of the layer."""
        return self.gpu + self.host + self.storage

    @property
    def below_gpu(self) -> int:
        """Tokens in host memory or storage."""
        return self.host + self.storage


def divide(pc: Constants, work: Workload, *, host_index_bytes: float = 0.0) -> Places:
    """Fill GPU memory, then host memory, evenly over the layers.

    Args:
        host_index_bytes: what an index of all layers takes of host memory before KV does.

    Raises:
        ConfigError: the weights do not fit the GPU.
    """
    shape = work.shape
    staging = 2 * work.alpha * work.layer_tokens * shape.kv_bytes  # two layers' selection
    room = pc.vram_bytes - pc.vram_reserve_bytes - 2 * shape.parameters
    if room < 0:
        raise ConfigError(f"{shape.name} does not fit {pc.vram_bytes / 2**30:.1f} GiB of VRAM")
    token_bytes = shape.layers * shape.kv_bytes
    gpu = min(work.layer_tokens, int(max(0.0, room - staging) // token_bytes))
    host_room = max(0.0, pc.host_kv_bytes - host_index_bytes)
    host = min(work.layer_tokens - gpu, int(host_room // token_bytes))
    return Places(gpu=gpu, host=host, storage=work.layer_tokens - gpu - host)


@dataclass(frozen=True)
class Locality:
    """What pools keep of what is selected next, by the share of the context that is hot."""

    hot: Sequence[float]
    """Shares of the context, rising, strictly between 0 and 1."""
    selected: Sequence[float]
    """Share of the selected that is hot, HillInfer's placement."""
    naive_selected: Sequence[float]
    """The same where the hot pool is whatever scores best at the moment."""
    naive_moved: Sequence[float]
    """Tokens that enter such a hot pool at a step, as a share of the context."""
    source: str = "assumed"

    def hot_share(self, hot: float, *, naive: bool = False) -> float:
        """Share of the selected among `hot` of the context; none of nothing, all of all."""
        points = self.naive_selected if naive else self.selected
        return float(np.interp(hot, (0.0, *self.hot, 1.0), (0.0, *points, 1.0)))

    def moved(self, hot: float) -> float:
        """Share of the context that the naive placement promotes at a step."""
        return float(np.interp(hot, (0.0, *self.hot, 1.0), (0.0, *self.naive_moved, 0.0)))


NO_LOCALITY = Locality((0.5,), (0.5,), (0.5,), (0.25,), "none: a pool has its share")
"""Every token is as likely to be selected as any other."""
