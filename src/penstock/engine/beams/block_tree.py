"""BlockTree: sequences as paths of blocks; forks share them, copy-on-write."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.engine.beams.decoding import Beam


@dataclass(eq=False, slots=True)
class Path(Beam):
    """One sequence: the blocks of its tokens in order, and how many tokens they hold.

    Between steps there are no more blocks than the tokens need; the last one may be partly filled.
    """

    length: int = 0
    blocks: list[int] = field(default_factory=list)
    released: bool = False

    def array(self) -> NDArray[np.int64]:
        """The blocks. int64 [blocks]"""
        return np.array(self.blocks, dtype=np.int64)


class BlockTree:
    """Who holds which block. A block is `block_tokens` tokens of one sequence, in all layers.

    Full blocks never change, so that any number of paths may hold one. A partly filled one belongs
    to the path that writes on: `grow` gives a path its own copy where others hold it too.

    Attributes:
        num_blocks: blocks that a path holds.
        end: one more than the highest block ever given out.
    """

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens > 0, block_tokens
        self.block_tokens = block_tokens
        self.num_blocks = 0
        self.end = 0
        self._holders: list[int] = []
        self._free: list[int] = []

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens fill or begin."""
        return -(-tokens // self.block_tokens)

    def holders(self, block: int) -> int:
        """Paths that hold a block."""
        return self._holders[block]

    def fork(self, path: Path) -> Path:
        """Another path with the same tokens."""
        assert not path.released, "a released beam was forked"
        for block in path.blocks:
            self._holders[block] += 1
        return Path(length=path.length, blocks=list(path.blocks))

    def needs_copy(self, path: Path) -> bool:
        """Whether `path` must get its own copy of its last block before it writes on."""
        return bool(
            path.length % self.block_tokens
            and len(path.blocks) == self.blocks_of(path.length)
            and self._holders[path.blocks[-1]] > 1
        )

    def growth(self, path: Path, length: int) -> int:
        """Blocks that `grow(path, length)` would make."""
        return self.blocks_of(length) - len(path.blocks) + self.needs_copy(path)

    def grow(self, path: Path, length: int) -> tuple[int, int] | None:
        """Give a path blocks for `length` tokens.

        Returns:
            The block to copy from and the one to copy to, where the last one was shared.
        """
        assert not path.released, "a released beam was extended"
        copy = None
        if self.needs_copy(path):
            copy = path.blocks[-1], self._take()
            self._holders[copy[0]] -= 1
            path.blocks[-1] = copy[1]
        while len(path.blocks) < self.blocks_of(length):
            path.blocks.append(self._take())
        return copy

    def trim(self, path: Path) -> list[int]:
        """Take away the blocks behind a path's tokens; returns those that no path holds now."""
        keep = self.blocks_of(path.length)
        surplus, path.blocks = path.blocks[keep:], path.blocks[:keep]
        return self._let_go(surplus)

    def release(self, path: Path) -> list[int]:
        """Let a path go; returns the blocks that no path holds now."""
        assert not path.released, "a beam was released twice"
        path.released = True
        return self._let_go(path.blocks)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = self.end
            self.end += 1
            self._holders.append(0)
        self._holders[block] = 1
        self.num_blocks += 1
        return block

    def _let_go(self, blocks: Sequence[int]) -> list[int]:
        gone = []
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                gone.append(block)
        self._free.extend(reversed(gone))
        self.num_blocks -= len(gone)
        return gone
