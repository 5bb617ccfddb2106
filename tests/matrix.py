"""`make test-matrix`: the suite as other machines run it, line by line, and the table of it.

A line is one `make test-all` in a fresh clone, under settings that stand for another machine. The
lines together cover every setting, and every pair of torch's and oneDNN's instruction sets.
Lines of several machines may stand in one table: `--add` takes over those of another one.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "test-matrix.md"
RESULT = TABLE.with_suffix(".json")
LONG_PATH = 150
"""Characters of a long temporary folder's path."""
OWN_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
ENVIRONMENT = ".venv/interpreter.stamp"
"""What the Makefile leaves when all that the tests need is installed."""
BUSY = 4
"""Processes that compute beside a line that is not left alone."""
TITLES = ("line", "settings", "machine", "Python", "torch", "transformers", "demo", "passed",
          "failed", "skipped", "workers", "s", "outcome", "commit")  # fmt: skip
NUMBERS = {"passed", "failed", "skipped", "workers", "s"}
_COMPILER = re.compile(
    r"(.+-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|tcc|icx)(-[\d.]+)?|c[89]9(-gcc)?"
)
_SUMMARY = re.compile(r"^=* ?(?:\d+ [a-z]+, )*\d+ [a-z]+ in [\d.]+s.*$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (failed|passed|skipped|error)")
_KERNEL_FLAGS = {"avx512": {"avx512f"}, "auto": {"avx512f", "avx512_vnni"}}
_TORCH_FLAGS = {"avx2": {"avx2"}, "avx512": {"avx512f"}}
_ONEDNN_FLAGS = {"AVX2": {"avx2"}, "AVX512_CORE": {"avx512f"}}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One run of the suite; what is not said is as `make test-all` has it."""

    name: str
    python: str = OWN_PYTHON
    transformers: str = ""
    torch: str = ""
    aten: str = ""
    onednn: str = ""
    threads: int = 1
    columns: int = 80
    kernels: str = "auto"
    """A level of `compiled.LEVELS`, or "none" where no compiler is found."""
    long_folder: bool = False
    shuffle: int | None = None
    other_sums: int | None = None
    busy: bool = False

    def said(self) -> str:
        """The settings that are not the default ones, in words."""
        defaults = Line(name="")
        words = {
            "aten": "ATEN_CPU_CAPABILITY={}", "onednn": "ONEDNN_MAX_CPU_ISA={}",
            "kernels": "PENSTOCK_KERNELS={}", "long_folder": f"folder of {LONG_PATH} characters",
            "shuffle": "random order {}", "other_sums": "other sums {}",
            "busy": f"{BUSY} busy processes", "threads": "{} threads", "columns": "COLUMNS={}",
            "transformers": "transformers {}", "torch": "torch {}", "python": "Python {}",
        }  # fmt: skip
        if self.kernels == "none":
            words["kernels"] = "no C compiler"
        parts = [
            text.format(getattr(self, name))
            for name, text in words.items()
            if getattr(self, name) != getattr(defaults, name)
        ]
        return ", ".join(parts) or "as it comes"


LINES = (
    Line(name="plain", python="3.11", columns=60),
    Line(name="onednn-avx2", onednn="AVX2", threads=2, long_folder=True, columns=200),
    Line(name="onednn-avx512", onednn="AVX512_CORE", threads=4, shuffle=1),
    Line(name="aten-avx2", aten="avx2", other_sums=1, busy=True),
    Line(name="both-avx2", aten="avx2", onednn="AVX2", kernels="plain", threads=2, shuffle=2),
    Line(name="avx2-avx512", aten="avx2", onednn="AVX512_CORE", other_sums=2, columns=60),
    Line(name="aten-avx512", aten="avx512", kernels="avx512", threads=4, long_folder=True),
    Line(name="no-compiler", kernels="none", threads=2, busy=True, columns=200, shuffle=3),
    Line(name="python-3.12-newest", python="3.12", transformers="5.*", aten="avx512",
         onednn="AVX2"),
    Line(name="python-3.13-oldest", python="3.13", transformers="5.2.0", aten="avx512",
         onednn="AVX512_CORE", columns=60),
    Line(name="torch-2.11", python="3.12", torch="2.11.0", transformers="5.2.0", threads=2,
         shuffle=4),
)  # fmt: skip


@dataclass(kw_only=True)
class Outcome:
    """What came of a line."""

    line: dict[str, Any]
    machine: dict[str, Any]
    """What `processor` says of the machine it was run on."""
    commit: str
    outcome: str
    """passed, failed, or why it could not be run."""
    workers: int = 2
    demo: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def find_python(version: str) -> str | None:
    """An interpreter of a version such as "3.12": on the path, or one of pyenv's."""
    found = [shutil.which(f"python{version}")]
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False)
        folders = Path(root.stdout.strip() or ".", "versions").glob(f"{version}.*/bin/python")
        found += map(str, sorted(folders))
    ask = "import ensurepip, sys; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"
    for path in filter(None, found):  # a shim is there for versions that are not chosen, too
        done = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return path
    return None


def processor() -> dict[str, Any]:
    """The machine's processor: its name, instruction sets that matter, and cores."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = text.partition(":")
            facts.setdefault(key.strip(), value.strip())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", "unknown"), "cores": os.cpu_count() or 1,
        "flags": [each for each in wanted if each in flags],
    }  # fmt: skip


def obstacle(line: Line, flags: Sequence[str]) -> str | None:
    """Why this machine cannot run a line; None where it can."""
    needed = (
        _TORCH_FLAGS.get(line.aten, set()) | _ONEDNN_FLAGS.get(line.onednn, set())
        | (_KERNEL_FLAGS.get(line.kernels, set()) if line.kernels != "auto" else set())
    )  # fmt: skip
    if lacking := sorted(needed - set(flags)):
        return f"the processor has no {', '.join(lacking)}"
    if line.aten == "avx2" and not line.onednn and "amx_bf16" in flags:
        return "torch's attention in bfloat16 takes AMX and refuses ATEN_CPU_CAPABILITY=avx2"
    if find_python(line.python) is None:
        return f"there is no Python {line.python}"
    return None


def without_compiler(folder: Path) -> str:
    """A PATH with every program but C compilers: links to them in a folder."""
    folder.mkdir()
    for place in os.environ.get("PATH", "").split(os.pathsep):
        for program in sorted(Path(place).glob("*")) if Path(place).is_dir() else []:
            link = folder / program.name
            if not _COMPILER.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def environment(line: Line, scratch: Path) -> dict[str, str]:
    """What the processes of a line see; `scratch` is an empty folder of its own."""
    unset = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "PYTEST_ADDOPTS", "OMP_NUM_THREADS",
             "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PENSTOCK_KERNELS", "PYTHONPATH",
             "VIRTUAL_ENV")  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name not in unset}
    given = {"--shuffle": line.shuffle, "--other-sums": line.other_sums}
    options = [f"{name}={seed}" for name, seed in given.items() if seed is not None]
    length = LONG_PATH - len(str(scratch)) - 1 if line.long_folder else 1
    temporary = scratch / ("t" * max(length, 1))
    temporary.mkdir()
    env |= {
        "COLUMNS": str(line.columns), "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": str(line.threads), "PYTEST_ADDOPTS": " ".join(options),
        # Threads of two workers that spin for each other leave no core to work on.
        "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip
    if line.aten:
        env["ATEN_CPU_CAPABILITY"] = line.aten
    if line.onednn:
        env["ONEDNN_MAX_CPU_ISA"] = line.onednn
    if line.kernels == "none":
        env["PATH"] = without_compiler(scratch / "bin")
        env.pop("CC", None)
    elif line.kernels != "auto":
        env["PENSTOCK_KERNELS"] = line.kernels
    return env


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def clone(line: Line, commit: str, work: Path) -> Path:
    """A fresh clone of the commit, one for all lines of the same environment."""
    plain = "plain" if line.kernels == "none" else ""
    names = (line.python, line.transformers, line.torch, plain)
    folder = work / "-".join(filter(None, ("clone", commit[:12], *names))).replace("*", "x")
    if not folder.exists():
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "-q", "--detach", commit], check=True)
    return folder


def make(
    target: str, line: Line, folder: Path, env: dict[str, str], *, workers: int, log: Path,
    limit_s: float,
) -> bool:  # fmt: skip
    """`make TARGET`, with all of its commands; its output is added to a log.

    Returns:
        Whether it ended in time, with every command done.
    """
    chosen = {
        "PYTHON": find_python(line.python), "TRANSFORMERS": line.transformers,
        "TORCH": line.torch, "THREADS": str(line.threads), "WORKERS": str(workers),
    }  # fmt: skip
    words = [f"{name}={value}" for name, value in chosen.items() if value]
    with log.open("a+", encoding="utf-8") as out:
        begins = out.tell()
        process = subprocess.Popen(
            ["make", "-i", target, *words], cwd=folder, env=env, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            out.write(f"\nstopped after {limit_s:.0f} s\n")
            return False
        out.seek(begins)
        return process.returncode == 0 and "(ignored)" not in out.read()


def read_log(text: str) -> dict[str, Any]:
    """Counts and failures of all of a log's runs of pytest."""
    counts = {"failed": 0, "passed": 0, "skipped": 0, "error": 0}
    for summary in _SUMMARY.findall(text):
        for number, what in _COUNT.findall(summary):
            counts[what] += int(number)
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return {
        "passed": counts["passed"], "failed": counts["failed"] + counts["error"],
        "skipped": counts["skipped"], "failures": sorted(set(failures)),
    }  # fmt: skip


def versions_of(python: Path, env: dict[str, str]) -> dict[str, str]:
    """What an environment has; nothing where it was not made."""
    ask = (
        "import json, platform; from importlib.metadata import version; print(json.dumps("
        "{'python': platform.python_version(), 'torch': version('torch'), "
        "'transformers': version('transformers')}))"
    )
    if not python.exists():
        return {}
    done = subprocess.run([python, "-c", ask], env=env, capture_output=True, text=True, check=False)
    found: dict[str, str] = json.loads(done.stdout or "{}")
    return found


def run(line: Line, commit: str, work: Path, *, workers: int, limit_s: float) -> Outcome:
    """Run the demo and the suite under a line's settings."""
    log = work / f"{line.name}.log"
    log.unlink(missing_ok=True)
    folder = clone(line, commit, work)
    with (
        tempfile.TemporaryDirectory(prefix="m", ignore_cleanup_errors=True) as scratch,
        busy(BUSY if line.busy else 0),
    ):
        env = environment(line, Path(scratch))
        target = functools.partial(
            make, line=line, folder=folder, env=env, workers=workers, log=log, limit_s=limit_s
        )
        made = target(ENVIRONMENT)
        shown = made and target("demo")
        began = time.monotonic()
        tested = made and target("test-all")
        seconds = time.monotonic() - began
        versions = versions_of(folder / ".venv" / "bin" / "python", env)
    found = read_log(log.read_text(encoding="utf-8", errors="replace"))
    good = tested and shown and found["passed"] > 0 and not found["failed"]
    return Outcome(
        line=asdict(line), machine=processor(), commit=commit, workers=workers,
        outcome="passed" if good else "failed", demo="right" if shown else "failed",
        seconds=round(seconds, 1), versions=versions, **found,
    )  # fmt: skip


def table(outcomes: Sequence[Outcome]) -> str:
    """The table in Markdown."""
    machines: list[dict[str, Any]] = []
    for each in outcomes:
        if each.machine not in machines:
            machines.append(each.machine)
    letters = string.ascii_uppercase
    bars = ("---:" if title in NUMBERS else "---" for title in TITLES)
    rows = [
        "# The suite on other machines", "",
        "`make test-matrix` wrote this table. A line is `make demo` and `make test-all` in a fresh",
        "clone. Its settings stand for another machine. Seconds are those of `make test-all`.",
        "A row stays until its line is run with newer code: its commit says what it is of.", "",
        *(
            f"- Machine {letter}: {has['cpu']}, {has['cores']} cores "
            f"({', '.join(has['flags']) or 'none of the sets that matter'})."
            for letter, has in zip(letters, machines, strict=False)
        ),
        "", f"| {' | '.join(TITLES)} |", f"| {' | '.join(bars)} |",
    ]  # fmt: skip
    for each in outcomes:
        line, have = Line(**each.line), each.versions
        versions = [have.get(name, "-") for name in ("python", "torch", "transformers")]
        figures = [each.passed, each.failed, each.skipped, each.workers, round(each.seconds)]
        rows.append("| " + " | ".join([
            line.name, line.said(), letters[machines.index(each.machine)], *versions,
            each.demo or "-", *map(str, figures), each.outcome, each.commit[:12],
        ]) + " |")  # fmt: skip
    for each in outcomes:
        if each.failures:
            rows += [
                "",
                f"{each.line['name']}: " + ", ".join(f"`{name}`" for name in each.failures),
            ]
    return "\n".join(rows) + "\n"


def save(done: dict[str, Outcome]) -> None:
    """Write the table and the same as JSON, in the order of `LINES`."""
    outcomes = [done[line.name] for line in LINES if line.name in done]
    document = {"lines": [asdict(each) for each in outcomes]}
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(table(outcomes), encoding="utf-8")


def passed(path: Path) -> dict[str, Outcome]:
    """A result's lines that some machine has passed, with whatever code."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    # An older result names one machine for all of its lines.
    shared = {"machine": document["machine"]} if "machine" in document else {}
    outcomes = [Outcome(**(shared | each)) for each in document["lines"]]
    now = {line.name: asdict(line) for line in LINES}
    return {
        each.line["name"]: each for each in outcomes
        if each.outcome == "passed" and now.get(each.line["name"]) == each.line
    }  # fmt: skip


def taken_over(
    done: dict[str, Outcome], more: dict[str, Outcome], commit: str
) -> dict[str, Outcome]:
    """Lines that have been passed, and those of another result: newer code before older."""
    found = dict(done)
    for name, each in more.items():
        if name not in found or is_same_code(each.commit, commit):
            found[name] = each
    return found


def git(*words: str) -> str:
    """What git says of this checkout."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def is_same_code(before: str, after: str) -> bool:
    """Whether two commits differ in the matrix's own table and in measured results alone."""
    if before == after:
        return True
    own = [f":!{path.relative_to(ROOT)}" for path in (TABLE, RESULT)]
    words = ["git", "diff", "--quiet", before, after, "--", ".", *own, ":!benchmarks/results"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done yet; returns 1 where a line failed."""
    parser = argparse.ArgumentParser(prog="make test-matrix", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", help="these lines, with commas between them")
    parser.add_argument("--list", action="store_true", help="say what would be run, and end")
    parser.add_argument("--work", type=Path, help="folder for clones and logs that is kept")
    parser.add_argument("--limit", type=float, default=90, help="minutes for each command")
    parser.add_argument("--workers", type=int, default=2, help="pytest's processes (2)")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="JSON",
                        help="take over what other machines passed, and end")  # fmt: skip
    args = parser.parse_args(arguments)
    names = {line.name for line in LINES}
    only = set(args.only.split(",")) if args.only else names
    if unknown := only - names:
        parser.error(f"no line is called {min(unknown)}; there are {', '.join(sorted(names))}")
    machine, commit = processor(), git("rev-parse", "HEAD")
    if args.list:
        for line in LINES:
            print(f"{line.name}: {obstacle(line, machine['flags']) or line.said()}")
        return 0
    done = passed(RESULT)
    if args.add:
        for path in args.add:
            done = taken_over(done, passed(path), commit)
        save(done)
        return 0
    own = [str(path.relative_to(ROOT)) for path in (TABLE, RESULT)]
    if git("status", "--porcelain", "--", ".", *(f":!{path}" for path in own)):
        parser.error("there are changes that are not committed, and a clone would lack them")
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="matrix")))
        work.mkdir(parents=True, exist_ok=True)
        for line in LINES:
            before = done.get(line.name)
            if line.name not in only:
                continue
            if before and before.machine == machine and is_same_code(before.commit, commit):
                continue
            if reason := obstacle(line, machine["flags"]):
                # What another machine has passed stays.
                done.setdefault(line.name, Outcome(
                    line=asdict(line), machine=machine, commit=commit, workers=args.workers,
                    outcome=f"not run: {reason}",
                ))  # fmt: skip
            else:
                print(f"{line.name}: {line.said()}", flush=True)
                done[line.name] = run(
                    line, commit, work.resolve(), workers=args.workers, limit_s=60 * args.limit
                )
            print(f"{line.name}: {done[line.name].outcome}", flush=True)
            save(done)
    save(done)
    return int(any(each.outcome == "failed" for each in done.values()))


if __name__ == "__main__":
    sys.exit(main())
