"""Compiles the CPU kernels when Penstock is installed; without a C compiler they are left out.

A wheel with the library is tagged for the platform that built it. Its kernels choose AVX2 or
AVX-512 when they run, so that one wheel fits every processor of the platform. Where the library
cannot be loaded (an older glibc, no OpenMP) a warning says so, and plain torch kernels are used.
A wheel built without a compiler has no library, and its tag is py3-none-any. A source distribution
compiles where it is installed; a wheel compiles nothing there.

Also `python hatch_build.py`, to build them in place.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside a build
    BuildHookInterface = object

FOLDER = Path(__file__).parent / "src" / "penstock" / "kernels" / "native"
FLAGS = ("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno",
         "-ffp-contract=off")  # fmt: skip
PARALLEL = "-fopenmp"
"""Torch's OpenMP is in the process already and is shared; without it kernels use one thread."""


def find_compiler() -> list[str] | None:
    """The C compiler: $CC, or what the system calls cc, gcc or clang."""
    given = shlex.split(os.environ.get("CC", ""))
    for command in (given, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None


def compile_kernels(folder: Path = FOLDER, more_flags: Sequence[str] = ()) -> Path | None:
    """Compile the library beside its sources; None, and a line on stderr, when that fails."""
    spec = importlib.util.spec_from_file_location("_compiled", folder / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = folder / module.file_name()
    compiler = find_compiler()
    if compiler is None:
        print("penstock: no C compiler; plain torch kernels will be used", file=sys.stderr)
        return None
    made = target.with_name(f"{target.name}.{os.getpid()}")
    define = f'-DPENSTOCK_SOURCE_DIGEST="{module.source_digest(folder)}"'
    sources = sorted(folder.glob("*.c"))
    for parallel in ([PARALLEL], []):
        command = [*compiler, *FLAGS, *parallel, *more_flags, define]
        failure = _build(command, sources, made)
        if failure is None:
            break
    else:
        print(
            f"penstock: the C compiler failed; plain torch kernels will be used\n{failure}",
            file=sys.stderr,
        )
        made.unlink(missing_ok=True)
        return None
    made.replace(target)
    return target


def _build(command: Sequence[str], sources: Sequence[Path], made: Path) -> str | None:
    """Compile the sources, as many at once as there are cores, and link; what failed, if any."""
    with TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(work, f"{source.stem}.o")) for source in sources]
        parts = [
            [*command, "-c", str(source), "-o", each]
            for source, each in zip(sources, objects, strict=True)
        ]
        for part in pool.map(_failure, parts):
            if part is not None:
                return part
        return _failure([*command, "-shared", "-o", str(made), *objects, "-lm"])


def _failure(command: Sequence[str]) -> str | None:
    """What a compiler says that fails; None when it does not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr


class CompiledKernels(BuildHookInterface):  # type: ignore[misc]
    """Hatchling's hook: a wheel with the library is for this platform, but for any Python 3."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put the library into the wheel."""
        if self.target_name != "wheel":
            return
        target = compile_kernels()
        if target is None:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"/{target.relative_to(Path(__file__).parent).as_posix()}")


if __name__ == "__main__":
    sys.exit(0 if compile_kernels() else 1)
