"""What `generate --disk` leaves in the blocks of a disk: noise, unless it is told otherwise."""

import contextlib
import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from penstock.models.loader import load
from tests.ready_process import ReadyProcess

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks at open files")

TEXT = "The patient said on the phone that " + " ".join(
    f"item {i} is {i * 37}." for i in range(120)
)
RUNS = """
import sys
from pathlib import Path
from penstock import LLM, SamplingParams
from penstock.cli.entry import main
from tests.shared_weights import read_once
text, disks = sys.argv[1], Path(sys.argv[2])
(once := read_once()).__enter__()
llm = LLM("recall", policy="quest", memory="1/2", store=disks / "sealed api", seal=True)
llm.generate(text, SamplingParams(temperature=0, max_tokens=8))
for disk, option, new in ("open", "--no-seal", 8), ("sealed and killed", "--seal", 4000):
    sys.argv[:] = [
        "penstock", "generate", "recall", "--prompt", text, "--disk", str(disks / disk), "--policy",
        "quest", "--memory", "1/2", "--max-new-tokens", str(new), option,
    ]
    try:
        main()
    except SystemExit as end:
        assert not end.code
"""
KILLED = "sealed and killed"
TIMEOUT_S = 240
ENOUGH_BYTES = 100_000


def hold_new(process: ReadyProcess, disks: Path, held: dict[int, int]) -> None:
    """Open for ourselves the files that another process has open below a folder, by inode."""
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inode = os.stat(entry).st_ino
            if inode not in held and os.readlink(entry).startswith(f"{disks}/"):
                held[inode] = os.open(entry, os.O_RDONLY)


def contents(disks: Path, held: dict[int, int]) -> dict[str, bytes]:
    """What lies in the held files, by the folder that they were made in."""
    found: dict[str, bytes] = {}
    for number in held.values():
        disk = Path(os.readlink(f"/proc/self/fd/{number}")).relative_to(disks).parts[0]
        found[disk] = found.get(disk, b"") + os.pread(number, os.fstat(number).st_size, 0)
    return found


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What lies in the files of two runs that have ended and of one that is killed in its middle,
    all three in one process."""
    disks = tmp_path_factory.mktemp("disks")
    for name in ("sealed api", "open", KILLED):
        (disks / name).mkdir()
    held: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT_S
    process = ReadyProcess(RUNS, TEXT, str(disks))
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # it is ending
                hold_new(process, disks, held)
            if len(contents(disks, held).get(KILLED, b"").strip(b"\0")) > ENOUGH_BYTES:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL, process.errors()
        return contents(disks, held)
    finally:
        process.__exit__()
        for number in held.values():
            os.close(number)


def rows_found(disk: bytes) -> int:
    """How many of the prompt's first 256 tokens have their values of layer 0 on the disk, nearly:
    other processes may sum in another order."""
    loaded = load("recall")
    assert loaded.tokenizer is not None
    ids = torch.tensor([loaded.tokenizer.encode(TEXT)])
    with torch.no_grad():
        values = loaded.model(ids, use_cache=True).past_key_values.layers[0].values[0]
    rows = values.transpose(0, 1)[:256, 0].float()
    whole = disk[: len(disk) // (2 * rows.shape[1]) * (2 * rows.shape[1])]
    there = torch.frombuffer(bytearray(whole), dtype=values.dtype).view(-1, rows.shape[1]).float()
    there = there.nan_to_num(1e9, 1e9, -1e9)
    # Few rows of the disk are near in the first components: only those are looked at in full.
    near = torch.cdist(rows[:, :4], there[:, :4], p=math.inf) < 0.05
    of_prompt, of_disk = near.nonzero(as_tuple=True)
    same = (rows[of_prompt] - there[of_disk]).abs().amax(dim=1) < 0.05
    return len(set(of_prompt[same].tolist()))


@pytest.mark.parametrize("run", [KILLED, "sealed api"])
def test_a_sealed_run_leaves_noise(run: str, left: dict[str, bytes]) -> None:
    assert len(left[run].strip(b"\0")) > ENOUGH_BYTES
    assert rows_found(left[run]) == 0


def test_an_open_run_leaves_the_prompts_values(left: dict[str, bytes]) -> None:
    assert rows_found(left["open"]) > 128
