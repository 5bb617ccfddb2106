"""load_tokenizer(): a tokenizer by itself, for a model that came without, or instead of its own."""

import os
from pathlib import Path

from transformers import AutoTokenizer

from penstock.core.errors import ModelLoadError
from penstock.models.load_errors import said_of
from penstock.models.loader import BUNDLED, Tokenizer


def load_tokenizer(
    name_or_path: str | Path,
    *,
    token: str | bool | None = None,
    offline: bool | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer as transformers finds it.

    Args:
        name_or_path: "recall" (the bundled model's), a folder, or a name on the Hugging Face hub.
        token, offline, trust_remote_code: as for `load`.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    name = os.path.expanduser(str(name_or_path))
    place = Path(__file__).parent / BUNDLED if name == BUNDLED else name
    is_folder = os.path.isdir(place)
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            place,
            token=token,
            local_files_only=bool(offline) or is_folder,
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:
        raise ModelLoadError(f"tokenizer {name_or_path}: {said_of(error)}") from error
    return tokenizer
