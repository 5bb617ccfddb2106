"""BeamMemory: where the KV of many beams is, and attention of the group whose turn it is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.ledger import MemoryLedger, MemoryReport
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.beams.block_tree import BlockTree, Path
from penstock.engine.beams.decoding import StepTraffic
from penstock.engine.beams.group_tensors import GroupTensors, GroupTensorsCache
from penstock.engine.beams.prompt_attention import PromptChunk
from penstock.kernels.plain_attention import add_attention_sink
from penstock.kernels.tree_attention import append_rows, tree_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What a block is made of: `block_tokens` tokens in every layer, keys and values by head."""

    kv: KVShape
    """All layers of the model, windowed ones too."""
    block_tokens: int
    windows: tuple[int | None, ...]
    """Tokens that a layer looks back, its own included; None for all. [layers]"""

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        return self.block_tokens * self.kv.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.kv.num_layers * self.layer_bytes

    def layered(self, slots: Tensor) -> Tensor:
        """Slots of bytes as blocks.

        Args:
            slots: uint8 [num_slots, slot_bytes], a slot at least a block long.

        Returns:
            The same memory. [num_slots, layers, 2, kv_heads, block_tokens, head_dim]
        """
        kv, step = self.kv, slots.stride(0) // self.kv.dtype.itemsize
        size = (kv.num_layers, 2, kv.num_kv_heads, self.block_tokens, kv.head_dim)
        strides = [1]
        for width in reversed(size[1:]):
            strides.insert(0, strides[0] * width)
        flat = slots.reshape(-1).view(kv.dtype) if slots.is_contiguous() else slots.view(kv.dtype)
        return flat.as_strided((slots.shape[0], *size), (step, *strides))


class BeamMemory(ABC):
    """Sequences of one search; groups of them take turns in fast memory.

    A step is `begin_step`, then for each group `begin_group`, tokens (every layer attends, then
    `token_done`), `end_group`; then `end_step`. A prompt is `begin_chunk`, all layers, `end_chunk`.

    Attributes:
        description: the slow tier, for people; says so when a device is simulated.
        simulated: name of the simulated device, or None.
        is_static: what `attend` launches is the same for every token of a group (a CUDA graph may
            hold it).
    """

    description: str
    simulated: str | None
    is_static = True

    def __init__(self, shape: BlockShape, ledger: MemoryLedger, device: torch.device) -> None:
        self.shape = shape
        self.tree = BlockTree(shape.block_tokens)
        self.device = device
        self._ledger = ledger
        self._groups = GroupTensorsCache(shape.block_tokens, device)
        self._group: GroupTensors | None = None
        self._chunk: PromptChunk | None = None
        self.traffic = StepTraffic()

    @property
    def group(self) -> GroupTensors:
        """The tensors of the group whose turn it is."""
        assert self._group is not None, "no group has begun"
        return self._group

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        """Take the new tokens of one layer in and attend.

        Args:
            layer: of the model.
            call: one token of every row of the group, or a chunk of the prompt (one row).

        Returns:
            [batch, new_tokens, num_heads, head_dim]
        """
        window = self.shape.windows[layer]
        if self._chunk is not None:
            return self._chunk.attend(self._slots(layer), call, window)
        group, slots = self.group, self._slots(layer)
        append_rows(slots, call.keys[:, :, 0], call.values[:, :, 0], group.table, group.places)
        out, lse = tree_attention(
            call.query[:, :, 0], slots, group.work, group.lengths, call.scaling,
            softcap=call.softcap, window=window,
        )  # fmt: skip
        if call.sink_logits is not None:
            added, _ = add_attention_sink(
                out.float()[:, :, None], lse[:, :, None], call.sink_logits
            )
            out = added[:, :, 0].to(out.dtype)
        return out[:, None]

    def report(self, full_cache_bytes: int) -> MemoryReport:
        """What is held in fast memory, item by item."""
        return self._ledger.report(full_cache_bytes)

    def fork(self, path: Path) -> Path:
        """Another sequence with the same tokens."""
        return self.tree.fork(path)

    @abstractmethod
    def _slots(self, layer: int) -> Tensor:
        """One layer of fast memory. [slots, 2, kv_heads, block_tokens, head_dim], strided"""

    @abstractmethod
    def begin_chunk(self, path: Path, num_tokens: int) -> None:
        """Make room for the next tokens of a prompt.

        Raises:
            BudgetError: fast memory does not hold them.
        """

    def end_chunk(self, path: Path, num_tokens: int) -> None:
        """All layers have attended."""
        path.length += num_tokens
        self._chunk = None

    @abstractmethod
    def begin_step(self, paths: Sequence[Path], num_tokens: int) -> list[list[int]]:
        """Plan a step of at most `num_tokens` tokens each.

        Returns:
            Indices of the paths that run together, group by group.

        Raises:
            BudgetError: fast memory does not hold a single beam at the step's end.
        """

    @abstractmethod
    def begin_group(self, index: int) -> None:
        """Bring a group into fast memory; `group` and `attend` are about it from now on.

        Raises:
            FetchError: the slow tier failed.
        """

    @abstractmethod
    def token_done(self, lengths: Sequence[int]) -> None:
        """Every layer has taken in a token; `lengths` are those of the group's rows now."""

    @abstractmethod
    def end_group(self, lengths: Sequence[int]) -> None:
        """The group has come to the end of its step, with sequences of these lengths."""

    @abstractmethod
    def end_step(self) -> StepTraffic:
        """The last group has ended; returns what the step moved."""

    @abstractmethod
    def lengthen(self, path: Path, num_tokens: int) -> None:
        """As if so many tokens had been decoded and saved, whatever they hold: for benchmarks that
        look at one step of a long search. Between steps; nothing is computed or moved.

        Args:
            num_tokens: up to the end of a block.
        """

    @abstractmethod
    def release(self, path: Path) -> None:
        """Let a sequence go."""

    @abstractmethod
    def close(self) -> None:
        """Give files and memory back; a second call does nothing."""
