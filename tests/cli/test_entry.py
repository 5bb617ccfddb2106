"""The process's entry point bounds what libraries keep beside the cache."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.entry import set_defaults
from tests.ready_process import ReadyProcess

MANY_SHAPES = """
import ctypes, os
from penstock.cli.entry import set_defaults
set_defaults()
import torch
from tests.mallinfo import Malloc
torch.set_num_threads(1)
info = ctypes.CDLL(None).mallinfo2
info.restype = Malloc
def in_use():
    held = info()
    return (held.uordblks + held.hblkhd) / 2**20
weight = torch.randn(64, 64, dtype=torch.bfloat16)
for tokens in range(64, 194):
    if tokens == 134:
        before = in_use()
    torch.nn.functional.linear(torch.ones(1, tokens, 64, dtype=torch.bfloat16), weight)
print(in_use() - before)
"""


def test_products_of_many_shapes_keep_no_memory() -> None:
    """60 shapes more than the first 70 keep 31 MiB where they are kept."""
    if sys.platform != "linux":
        pytest.skip("asks glibc what is in use")
    with ReadyProcess(MANY_SHAPES) as run:
        said, code = run.stdout.read(), run.wait()
        if "mallinfo2" in run.errors():
            pytest.skip("no glibc of 2.33 or newer")
        assert code == 0, run.errors()
    assert float(said) < 6


MANY_THREADS = """
import ctypes, re, threading
from pathlib import Path
from penstock.cli.entry import set_defaults
set_defaults()
import numpy as np
np.ones(20 << 20, dtype=np.uint8)  # freed: from here on glibc keeps tops of up to 40 MiB
def in_use():
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"Anonymous: +([0-9]+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(found[1]) / 1024
before = in_use()
together = threading.Barrier(8)
def use():
    blocks = [np.ones(100 << 10, dtype=np.uint8) for _ in range(300)]
    together.wait()
    del blocks
    together.wait()
threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(in_use() - before)
"""


def test_threads_keep_no_memory_that_they_freed() -> None:
    """Eight threads that free 29 MiB each leave most of it in arenas of their own."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("is about glibc's arenas")
    done = subprocess.run(
        [sys.executable, "-c", MANY_THREADS],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 30


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults replace nothing."""
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    set_defaults()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


SHORT_ANSWERS = """
import sys
from penstock.cli.main import app
library = sys.argv[1]
for arguments, code in (
    (["--help"], 0), (["--version"], 0), (["bench", "--help"], 0), (["plan", "--help"], 0),
    (["search", "--help"], 0), (["config"], 0),
    (["doc", "ls", "--library", library], 0), (["doc", "gc", "--library", library], 0),
    (["generat"], 2), (["generate", "tiny", "--tokens", "9"], 2), (["devices", "--size"], 2),
):
    try:
        app(arguments)
    except SystemExit as leave:
        assert leave.code == code, (arguments, leave.code)
    heavy = {"torch", "transformers"} & set(sys.modules)
    assert not heavy, (arguments, heavy)
"""


def test_what_needs_no_model_imports_no_torch(tmp_path: Path) -> None:
    """Torch alone takes seconds; help, lists of documents and bad usage answer at once."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT_ANSWERS, str(tmp_path / "library")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no documents in" in done.stdout
