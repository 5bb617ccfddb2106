"""One virtual environment per peer, with pinned requirements, over one torch for all."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

TORCH = "torch==2.13.0"
BASE = "torch"
SOURCE = Path(__file__).resolve().parents[2] / "src"
_STAMP = "installed.stamp"


class InstallError(Exception):
    """An environment could not be built; the message is the last line of what pip said."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What is installed for one peer.

    Attributes:
        requirements: pinned, installed together with what they need.
        alone: installed without what they say they need, after the others.
        shares_torch: the base environment's packages come behind its own.
        uses_source: this source tree's package can be imported.
        reports: distributions whose versions stand in the result.
        compiler_flags: for what is compiled, on x86-64.
    """

    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()
    shares_torch: bool = True
    uses_source: bool = False
    reports: tuple[str, ...] = ()
    compiler_flags: str = ""


ENVIRONMENTS: Mapping[str, Environment] = MappingProxyType({
    "transformers": Environment(
        requirements=("transformers==5.23.0", "optimum-quanto==0.2.7", "hqq==0.2.8.post1"),
        reports=("torch", "transformers", "optimum-quanto", "hqq"),
    ),
    "kvpress": Environment(
        requirements=("kvpress==0.5.5", "transformers==5.2.0"),
        reports=("torch", "transformers", "kvpress"),
    ),
    # Its metadata asks for flash-attn, which builds CUDA code, and allows releases of
    # transformers under which it answers wrongly.
    "ollm": Environment(
        requirements=("transformers==4.57.0", "accelerate==1.10.1"), alone=("ollm==1.0.3",),
        reports=("torch", "transformers", "ollm"),
    ),
    "llama.cpp": Environment(
        requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0"), shares_torch=False,
        reports=("llama-cpp-python", "gguf"),
        # Its kernels for AMX crash in virtual machines; all else is what this machine has.
        compiler_flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16",
    ),
    "penstock": Environment(
        requirements=(
            "transformers==5.23.0", "safetensors==0.8.0", "psutil==7.2.2", "typer==0.29.2",
            "rich==15.0.0", "xxhash==4.1.0", "filelock==4.3.1", "cryptography==50.0.2",
            "tqdm==4.70.1", "gguf==0.19.0", "accelerate==1.15.0",
        ),
        uses_source=True, reports=("torch", "transformers"),
    ),
})  # fmt: skip


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def build(name: str, root: Path, *, torch: str = TORCH, pip_arguments: Sequence[str] = ()) -> Path:
    """Make the environment of a peer below `root`, unless it is there already.

    Returns:
        Its interpreter.

    Raises:
        InstallError: something could not be installed.
    """
    wanted = ENVIRONMENTS[name]
    paths = []
    if wanted.shares_torch:
        base = root / BASE
        _build(base, [torch, "numpy"], [], [], pip_arguments)
        paths.append(_packages(base))
    if wanted.uses_source:
        paths.append(SOURCE)
    folder = root / name
    _build(folder, wanted.requirements, wanted.alone, paths, pip_arguments, wanted.compiler_flags)
    return python_of(folder)


def _build(
    folder: Path,
    requirements: Sequence[str],
    alone: Sequence[str],
    paths: Sequence[Path],
    pip_arguments: Sequence[str],
    compiler_flags: str = "",
) -> None:
    text = "\n".join([*requirements, "--no-deps", *alone, *map(str, paths)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    stamp = folder / _STAMP
    if stamp.is_file() and stamp.read_text(encoding="ascii").strip() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    (_packages(folder) / "shared.pth").write_text("".join(f"{path}\n" for path in paths))
    pip = [str(python_of(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *pip_arguments, *requirements], _compiling(compiler_flags))
    if alone:
        _run([*pip, *pip_arguments, "--no-deps", *alone])
    stamp.write_text(digest + "\n", encoding="ascii")


def _packages(folder: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"


def _compiling(flags: str) -> dict[str, str]:
    """Variables that hand flags to what CMake builds."""
    if not flags or platform.machine() != "x86_64":
        return {}
    asked = f"-DCMAKE_C_FLAGS='{flags}' -DCMAKE_CXX_FLAGS='{flags}' -DLLAVA_BUILD=OFF"
    return {"CMAKE_ARGS": f"{asked} {os.environ.get('CMAKE_ARGS', '')}".strip()}


def _run(command: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        raise InstallError((errors or lines or ["pip failed"])[-1].strip())
