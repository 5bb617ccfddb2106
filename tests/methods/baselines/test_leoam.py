"""LeoAM-like by hand: 24 tokens, three coarse chunks of eight, two of them opened."""

import torch

from penstock.core.shape import KVShape
from penstock.methods.baselines.chunk_bounds import ChunkBoundsIndex

SHAPE = KVShape(
    num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=2, dtype=torch.float32
)  # fmt: skip


def make_index(fine_units: int = 1, max_units: int = 24) -> ChunkBoundsIndex:
    return ChunkBoundsIndex(
        SHAPE, batch=1, max_units=max_units, group_tokens=1, fine_units=fine_units,
        selected_units=2, device=torch.device("cpu"),
    )  # fmt: skip


def test_two_levels_by_hand() -> None:
    keys = torch.zeros(24, 2)
    keys[4], keys[5] = torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0])
    keys[10] = torch.tensor([1.5, 0.0])
    keys[16:] = torch.tensor([-1.0, 0.0])
    index = make_index()
    index.append(keys.view(1, 24, 1, 2), 0)
    scores = index.score(torch.tensor([[[1.0, -1.0]]]), 24)[0]
    # Bounds of the large chunks: 1 + 1 = 2 (though no key of the first has more than 0), 1.5, -1.
    # The first two are opened; token 10 is the best. The third stays closed and lies below all:
    # -1 + (0 - 2) - 1.
    expected = torch.zeros(24)
    expected[10] = 1.5
    expected[16:] = -4.0
    assert torch.equal(scores, expected)


def test_chunks_grow_unit_by_unit_and_are_made_anew() -> None:
    index = make_index(fine_units=2)
    query = torch.tensor([[[1.0, 0.0]]])
    for place, value in enumerate([1.0, 5.0, 2.0]):
        index.append(torch.tensor([value, 0.0]).view(1, 1, 1, 2), place)
    # Tokens 0 and 1 are one fine chunk, token 2 begins the next.
    assert index.score(query, 3).tolist() == [[5.0, 5.0, 2.0]]
    # The cache was cropped: another token 0 begins the chunk again.
    index.append(torch.tensor([3.0, 0.0]).view(1, 1, 1, 2), 0)
    assert index.score(query, 1).tolist() == [[3.0]]


def test_the_last_chunk_may_be_unfinished() -> None:
    index = make_index(max_units=19)
    keys = torch.arange(19.0).unsqueeze(1).expand(19, 2)
    index.append(keys.reshape(1, 19, 1, 2), 0)
    scores = index.score(torch.tensor([[[1.0, 0.0]]]), 19)[0]
    assert scores.shape == (19,)
    # The chunks that end in 18 and 15 are opened; the first, with 7, is closed: 7 + (8 - 18) - 1.
    assert scores[8:].tolist() == list(range(8, 19))
    assert scores[:8].tolist() == [-4.0] * 8
