"""What `generate --disk` leaves in the blocks of a disk: noise, unless it is told otherwise."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from penstock.models.loader import load

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks at open files")

TEXT = "The patient said on the phone that " + " ".join(
    f"item {i} is {i * 37}." for i in range(120)
)
RUN = "import sys; from penstock.cli.entry import main; sys.argv[0] = 'penstock'; main()"
API = """
import sys
from penstock import LLM, SamplingParams
text, disk, new = sys.argv[1:]
llm = LLM("recall", policy="quest", memory="1/2", store=disk, seal=True)
llm.generate(text, SamplingParams(temperature=0, max_tokens=int(new)))
"""
TIMEOUT_S = 120
ENOUGH_BYTES = 100_000


def start(kind: str, disk: Path, seal: str, new_tokens: int) -> "subprocess.Popen[bytes]":
    if kind == "api":
        call = [API, TEXT, str(disk), str(new_tokens)]
    else:
        call = [
            RUN, "generate", "recall", "--prompt", TEXT, "--disk", str(disk), "--policy", "quest",
            "--memory", "1/2", "--max-new-tokens", str(new_tokens), *([seal] if seal else []),
        ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", *call], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def hold_new(process: "subprocess.Popen[bytes]", disk: Path, held: dict[int, int]) -> None:
    """Open for ourselves the files that another process has open in a folder, by inode."""
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inode = os.stat(entry).st_ino
            if inode not in held and os.readlink(entry).startswith(f"{disk}/"):
                held[inode] = os.open(entry, os.O_RDONLY)


def content(held: dict[int, int]) -> bytes:
    return b"".join(os.pread(number, os.fstat(number).st_size, 0) for number in held.values())


def capture(kind: str, disk: Path, seal: str, *, kill: bool) -> bytes:
    """What lies in the files of a run that is killed in its middle, or that has ended."""
    disk.mkdir()
    process = start(kind, disk, seal, 4000 if kill else 8)
    held: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # it is ending
                hold_new(process, disk, held)
            if kill and len(content(held).strip(b"\0")) > ENOUGH_BYTES:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        process.wait(TIMEOUT_S)
        assert process.returncode == (-signal.SIGKILL if kill else 0)
        return content(held)
    finally:
        process.kill()
        process.wait()
        for number in held.values():
            os.close(number)


def rows_found(disk: bytes) -> int:
    """How many of the prompt's first 256 tokens have their values of layer 0 on the disk."""
    loaded = load("recall")
    assert loaded.tokenizer is not None
    ids = torch.tensor([loaded.tokenizer.encode(TEXT)])
    with torch.no_grad():
        values = loaded.model(ids, use_cache=True).past_key_values.layers[0].values[0]
    rows = values.transpose(0, 1).contiguous()[:256]
    raw = rows.reshape(256, -1).view(torch.uint8).numpy()
    width = raw.shape[1] // rows.shape[1]
    return sum(row[:width].tobytes() in disk for row in raw)


@pytest.mark.parametrize(("kind", "kill"), [("command", True), ("api", False)])
def test_a_sealed_run_leaves_noise(kind: str, kill: bool, tmp_path: Path) -> None:
    disk = capture(kind, tmp_path / "disk", "--seal", kill=kill)
    assert len(disk.strip(b"\0")) > ENOUGH_BYTES
    assert rows_found(disk) == 0


def test_an_open_run_leaves_the_prompts_values(tmp_path: Path) -> None:
    assert rows_found(capture("command", tmp_path / "disk", "--no-seal", kill=False)) > 128
