"""ArkVale: the cuboid-mean digest, worked by hand."""

import torch

from penstock.core.shape import KVShape
from penstock.methods.baselines.page_digest import PageDigestIndex

SHAPE = KVShape(
    num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=2, dtype=torch.float32
)  # fmt: skip


def test_by_hand() -> None:
    keys = torch.tensor([
        # From 0 to 4 and from -2 to 2: centre (2, 0), distances 2, 2, 1, 1 and 2, 2, 0, 0.
        [0.0, -2.0], [4.0, 2.0], [1.0, 0.0], [3.0, 0.0],
        # One key four times: the centre is it, and nothing around.
        [3.0, -1.0], [3.0, -1.0], [3.0, -1.0], [3.0, -1.0],
    ]).view(1, 8, 1, 2)  # fmt: skip
    index = PageDigestIndex(
        SHAPE, batch=1, max_groups=3, group_tokens=4, device=torch.device("cpu")
    )
    index.append(keys, 0)
    # Half-extents of the first page: (1.5, 1).
    # Query (1, -2): first 2 + 0 + 1.5 + 2 = 5.5, second 3 + 2 = 5.
    # Query (0, 1): first 0 + 1 = 1, second -1.
    query = torch.tensor([[[1.0, -2.0], [0.0, 1.0]]])
    assert index.score(query, 2).tolist() == [[6.5, 4.0]]


def test_a_page_at_a_time_is_the_same() -> None:
    torch.manual_seed(0)
    keys = torch.randn(2, 12, 1, 2)
    whole, pieces = (
        PageDigestIndex(SHAPE, batch=2, max_groups=3, group_tokens=4, device=torch.device("cpu"))
        for _ in range(2)
    )
    whole.append(keys, 0)
    for first in (0, 4, 8):
        pieces.append(keys[:, first : first + 4], first)
    query = torch.randn(2, 2, 2)
    assert torch.equal(whole.score(query, 3), pieces.score(query, 3))
