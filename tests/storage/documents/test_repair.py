"""Short or missing files of units are repaired; a removal that cannot end does not begin."""

import os
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import DocumentDamagedError, StorageError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument, remove
from penstock.storage.unit_region import UnitRegion

KEY = bytes(range(32))
SHAPE = Shape(layers=3, unit_bytes=5000)


def append_all(writer: DocumentWriter, stamp: int, count: int) -> list[np.ndarray]:
    draw = np.random.default_rng(stamp)
    parts = [
        draw.integers(0, 256, (count, SHAPE.padded_bytes), dtype=np.uint8)
        for _ in range(SHAPE.layers)
    ]
    for layer, part in enumerate(parts):
        writer.append(layer, part)
    return parts


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("harm", ["short", "missing"])
def test_a_repair_gives_lost_units_their_place_back(
    harm: str, key: bytes | None, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    with DocumentWriter.create(folder, SHAPE, key=key) as writer:
        append_all(writer, 1, 6)
        writer.commit(identity={}, about={}, blobs={"a": b"b"})
    path = folder / "kv-1.units"
    if harm == "short":
        os.truncate(path, 2 * SHAPE.padded_bytes + 100)
    else:
        path.unlink()
    with pytest.raises(DocumentDamagedError, match="kv-1"):
        DocumentWriter.extend(folder, key=key)
    lost = [2, 3, 4, 5] if harm == "short" else list(range(6))
    with DocumentWriter.extend(folder, key=key, repair=True) as writer:
        fresh = append_all(writer, 9, len(lost))
        writer.commit(identity={}, about={}, blobs={}, keep_blobs=["a"])
    with StoredDocument.open(folder, key=key) as stored:
        assert stored.verify().units == {1: lost}
        assert stored.blob("a") == b"b"
        assert stored.num_units == 6 + len(lost)
        buffer = AlignedBuffer(len(lost), SHAPE.padded_bytes)
        units = np.arange(6, 6 + len(lost))
        UnitRegion(stored.files[1], SHAPE.unit_bytes).submit_read(
            units, buffer, np.arange(len(lost))
        ).wait()
        assert np.array_equal(buffer.array, fresh[1])


def test_nothing_goes_where_the_folder_could_not_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "d"
    with DocumentWriter.create(folder, SHAPE) as writer:
        append_all(writer, 1, 2)
        writer.commit(identity={}, about={}, blobs={})
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(StorageError, match="nothing was removed"):
        remove(folder)
    with StoredDocument.open(folder) as stored:
        assert not stored.verify()
    monkeypatch.undo()
    remove(folder)
    assert not folder.exists()
