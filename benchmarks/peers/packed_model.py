"""Weights in 8 or 4 bits for Penstock: packed once, mapped from a file in a measured process.

    python packed_model.py MODEL_FOLDER int4

They are made of the folder's plain weights. A folder without any has them in the GGUF file of
4-bit codes beside it, which llama.cpp reads too.
"""

import sys
from pathlib import Path
from typing import Any

from penstock.models.loader import WEIGHTS
from penstock.models.model_config import read_config
from penstock.models.packed.kept import kept_model
from penstock.models.packed.sources import GgufFile, PackedSource


def packed_model(folder: Path, weights: str) -> Any:
    """A folder's model with weights of a kind that `penstock.load` knows."""
    known: dict[str, Any] = {
        "folder": folder, "config": read_config(folder, folder.name), "dtype": "auto",
        "bits": WEIGHTS[weights], "own_code": False, "on_bytes": lambda what, done, total: None,
    }  # fmt: skip
    is_plain = any(folder.glob("*.safetensors"))
    source = PackedSource(**known) if is_plain else GgufFile(file=coded_file(folder), **known)
    return kept_model(source, packed_folder(folder))[0]


def coded_file(folder: Path) -> Path:
    """The 4-bit codes beside a folder."""
    return folder.with_name(f"{folder.name}.q4_0.gguf")


def packed_folder(folder: Path) -> Path:
    """Where packed weights of a folder are kept."""
    return folder.with_name(f"{folder.name}.packed")


if __name__ == "__main__":
    packed_model(Path(sys.argv[1]), sys.argv[2])
