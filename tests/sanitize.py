"""`make sanitize`: the compiled kernels under ASan and UBSan, and without a compiler's warning.

A copy of the package gets a library of its own, so that production has no switch for it.
"""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
FLAGS = (
    "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-O1", "-g",
    "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror",
)  # fmt: skip
TESTS = (
    "tests/kernels", "tests/methods/kvswap", "tests/methods/dynakv",
    "tests/methods/test_half_precision.py", "tests/methods/test_hostile_files.py",
    "tests/methods/louiskv/test_device_semantic_units.py",
    "tests/methods/hillinfer/test_scorer.py", "tests/engine/test_adapter.py",
    "tests/engine/test_rank_shares.py", "tests/engine/test_fused_fetch.py",
    "tests/storage/test_native_aio.py", "tests/storage/test_block_cipher.py",
)  # fmt: skip
"""What calls compiled kernels, or gives them files that somebody has changed."""
TRITON = ("tests/kernels/device", "tests/kernels/tree/test_tree_attention_triton.py",
          "tests/kernels/test_kmeans_triton.py")  # fmt: skip
LEVELS = ("auto", "plain")
"""Of PENSTOCK_KERNELS: every kernel there is, and every plain loop."""


def runtime(compiler: list[str]) -> str:
    """What must be in the process before anything else: the sanitizers' own library, and that of
    C++, whose exceptions it stands between."""
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        asked = [*compiler, f"-print-file-name={name}"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
        found.append(done.stdout.strip())
        if not Path(found[-1]).is_absolute():
            raise SystemExit(f"{compiler[0]} brings no {name}; set CC to a gcc that does")
    return " ".join(found)


def environment(source: Path, level: str, preload: str) -> dict[str, str]:
    """What a run of the tests sees."""
    return {
        **os.environ, "PYTHONPATH": str(source), "PENSTOCK_KERNELS": level, "LD_PRELOAD": preload,
        # Python lets what it still holds go with the process; the sanitizers stop at the first.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1", "PYTHONMALLOC": "malloc",
    }  # fmt: skip


SEES = """
import numpy as np
from penstock.kernels.native import compiled

run, lists = compiled.kernel("copy_runs"), np.array([[80], [0]], dtype=np.int64)
source, target = np.zeros(64, dtype=np.uint8), np.zeros(80, dtype=np.uint8)
lists[1] = compiled.address(target)
run(compiled.address(source), compiled.address(lists), compiled.address(lists) + 8, 1)
"""
"""A read past an array, which must be seen, or nothing else would be."""


def sees(env: dict[str, str]) -> bool:
    """Whether the sanitizers are at work."""
    done = subprocess.run(
        [sys.executable, "-c", SEES], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode != 0 and "heap-buffer-overflow" in done.stderr


def main(tests: list[str]) -> int:
    """Compile, and run tests (by default `TESTS`) under every level."""
    hook = importlib.import_module("hatch_build")
    compiler = hook.find_compiler()
    if compiler is None:
        raise SystemExit("there is no C compiler; set CC")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch)
        leave = shutil.ignore_patterns("kernels.*o", "__pycache__")
        shutil.copytree(ROOT / "src" / "penstock", source / "penstock", ignore=leave)
        if hook.compile_kernels(source / "penstock" / "kernels" / "native", FLAGS) is None:
            return 1
        left_out = [f"--ignore={each}" for each in TRITON]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--capture=sys",
            *left_out,
        ]
        for level in LEVELS:
            env = environment(source, level, runtime(compiler))
            if not sees(env):
                raise SystemExit("the sanitizers do not see a read past an array")
            print(f"PENSTOCK_KERNELS={level}", flush=True)
            done = subprocess.run([*command, *(tests or TESTS)], cwd=ROOT, env=env, check=False)
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
