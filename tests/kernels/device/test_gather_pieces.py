"""gather_pieces: pieces scattered over host memory, in both directions."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.device.gather_pieces import gather_pieces


def check(device: str, piece_bytes: int, count: int) -> None:
    """Pieces go to chosen rows, and back to other places; nothing else is touched."""
    generator = torch.Generator().manual_seed(piece_bytes + count)
    pinned = device == "cuda"
    host = torch.randint(0, 256, (3 * count + 1, piece_bytes), generator=generator).byte()
    host = host.pin_memory() if pinned else host
    rows = torch.zeros(2 * count + 1, piece_bytes, dtype=torch.uint8, device=device)
    places = torch.randperm(len(host), generator=generator)[:count]
    index = torch.randperm(len(rows), generator=generator)[:count]

    def addresses(pieces: Tensor) -> Tensor:
        return (host.data_ptr() + pieces * piece_bytes).to(device)

    gather_pieces(addresses(places), rows, index.to(device), to_host=False)
    wanted = torch.zeros(rows.shape, dtype=torch.uint8)
    wanted[index] = host[places]
    assert torch.equal(rows.cpu(), wanted)

    before, others = host.clone(), torch.randperm(len(host), generator=generator)[:count]
    gather_pieces(addresses(others), rows, index.to(device), to_host=True)
    if pinned:
        torch.cuda.synchronize()
    before[others] = wanted[index]
    assert torch.equal(host, before)


@pytest.mark.parametrize(("piece_bytes", "count"), [(16, 1), (4096, 5), (20496, 7), (64, 0)])
def test_pieces_go_there_and_back(piece_bytes: int, count: int) -> None:
    check("cpu", piece_bytes, count)


@pytest.mark.gpu
@pytest.mark.parametrize(("piece_bytes", "count"), [(16, 1), (4096, 5), (20496, 70), (262144, 300)])
def test_pieces_go_there_and_back_on_a_gpu(piece_bytes: int, count: int) -> None:
    check("cuda", piece_bytes, count)
