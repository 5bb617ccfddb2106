"""BlockTree against sequences of tokens kept one by one: who shares what, and when it is free."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.beams.block_tree import BlockTree, Path

BLOCK_TOKENS = 3


class TreeMachine(RuleBasedStateMachine):
    """Paths as lists of distinct tokens, and what was written to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = BlockTree(BLOCK_TOKENS)
        self.paths: list[tuple[Path, list[int]]] = [(Path(), [])]
        self.content: dict[int, list[int]] = {}
        self.next_token = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.paths) - 1))

    @rule(data=st.data(), new=st.integers(1, 10), spare=st.integers(0, 7))
    def extend(self, data: st.DataObject, new: int, spare: int) -> None:
        path, tokens = self.paths[self.pick(data)]
        expected = self.tree.growth(path, path.length + new + spare)
        before = self.tree.num_blocks
        copy = self.tree.grow(path, path.length + new + spare)
        assert self.tree.num_blocks - before == expected
        if copy is not None:
            self.content[copy[1]] = list(self.content[copy[0]])
        for _ in range(new):
            block = path.blocks[path.length // BLOCK_TOKENS]
            assert self.tree.holders(block) == 1, "a block that somebody else sees is written"
            if path.length % BLOCK_TOKENS == 0:
                self.content[block] = []
            self.content[block].append(self.next_token)
            tokens.append(self.next_token)
            path.length += 1
            self.next_token += 1
        for block in self.tree.trim(path):
            assert self.tree.holders(block) == 0

    @precondition(lambda self: len(self.paths) < 12)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        path, tokens = self.paths[self.pick(data)]
        before = self.tree.num_blocks
        self.paths.append((self.tree.fork(path), list(tokens)))
        assert self.tree.num_blocks == before, "a fork costs nothing"

    @precondition(lambda self: len(self.paths) > 1)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        path, _ = self.paths.pop(self.pick(data))
        others = {block for other, _ in self.paths for block in other.blocks}
        assert set(self.tree.release(path)) == set(path.blocks) - others

    @invariant()
    def every_path_reads_its_tokens(self) -> None:
        held = set()
        for path, tokens in self.paths:
            assert len(path.blocks) == self.tree.blocks_of(path.length)
            read = [token for block in path.blocks for token in self.content[block]]
            assert read[: path.length] == tokens
            held.update(path.blocks)
        assert self.tree.num_blocks == len(held)


TestBlockTree = TreeMachine.TestCase
TestBlockTree.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
