"""What a measurement was made on: CPU, memory, kernel, disk, GPU and library versions."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from penstock.core.cpu_name import cpu_name
from penstock.storage.file_space import default_directory, file_system

Facts = dict[str, str | int | float | None]

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = ("penstock", "torch", "transformers", "numpy")


def describe_machine(store: str = "auto") -> Facts:
    """The machine, without host names or paths.

    Args:
        store: directory of the KV cache, for its file system; "auto" as in `KVStore.create`.
    """
    directory = default_directory() if store == "auto" else store
    return {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "allowed_cores": _allowed_cores(),
        "threads": torch.get_num_threads(),
        "ram_bytes": int(psutil.virtual_memory().total),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "disk": file_system(directory) or "unknown file system",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def describe_libraries() -> Facts:
    """Versions of Python and of the libraries that matter."""
    facts: Facts = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    facts["torch"] = torch.__version__
    return facts


def current_commit(source: Path = _PACKAGE) -> str:
    """The commit of the source tree, with "+changes" when files differ from it; else "unknown".

    Args:
        source: the folder that must not differ, with all that is in it; the package by default.
            Programs under research at the top of its repository must not differ either.
    """
    try:
        commit = _git(source, "rev-parse", "--short=12", "HEAD")
        changes = _git(source, "status", "--porcelain", "--", ".", ":(top)research")
        return commit + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def _allowed_cores() -> int | None:
    """Cores that this process may run on (taskset), where the system says."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return len(os.sched_getaffinity(0))
