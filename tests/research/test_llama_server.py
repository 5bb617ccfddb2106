"""What is asked of llama.cpp's server, and what is made of its answers."""

import socket
import sys
from pathlib import Path

import pytest
import torch

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.shape import KVShape
from penstock.evaluate.result import Result
from research.serving.llama_server import cache_type, served
from research.serving.program import run

SHAPE = KVShape(num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=32, dtype=torch.bfloat16)
FULL = SHAPE.full_cache_bytes(1, 2 * (40 + 5 + 8))
SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for token in range(asked["n_predict"] - {missing}):
            said = json.dumps(dict(content="x", tokens=[token]))
            self.wfile.write(f"data: {{said}}\\n\\n".encode())
        self.wfile.write(b"data: " + json.dumps(dict(stop=True, tokens=[])).encode() + b"\\n\\n")

open({seen!r}, "w").write(" ".join(sys.argv[1:]))
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def program(folder: Path, missing: int = 0) -> Path:
    """Stands for the server; what it was given is in a file `seen`."""
    made, seen = folder / "llama-server", str(folder / "seen")
    made.write_text(SERVER.format(python=sys.executable, missing=missing, seen=seen))
    made.chmod(0o755)
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="reads what a process holds")
def test_every_request_is_answered_in_full(tmp_path: Path) -> None:
    prompts = [list(range(40)), list(range(40))]
    row = served(
        program(tmp_path), tmp_path / "m.gguf", prompts, 5, shape=SHAPE, limit_bytes=FULL // 2,
        threads=3, port=free_port(),
    )  # fmt: skip
    seen = (tmp_path / "seen").read_text()
    assert row["new_tokens"] == 10
    assert row["cache_type"] == "q4_0"
    assert row["cache_tokens"] == 2 * 53
    assert "--parallel 2" in seen
    assert "--cache-type-k q4_0" in seen
    assert "--threads 3" in seen
    assert "-fa on" in seen
    short = tmp_path / "short"
    short.mkdir()
    with pytest.raises(PenstockError, match="in full: 4 of 5 tokens"):
        served(
            program(short, missing=1), tmp_path / "m.gguf", prompts, 5, shape=SHAPE,
            limit_bytes=FULL, threads=1, port=free_port(),
        )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads what a process holds")
def test_a_run_keeps_what_it_said_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        served, "__kwdefaults__", {**(served.__kwdefaults__ or {}), "port": free_port()}
    )
    out = tmp_path / "result.json"
    report = run([
        "--model", "tiny", "--clients", "2", "--tokens", "30", "40", "--answer", "3",
        "--memory", "8MiB", "--disk", "memory", "--beside", "llama.cpp", "--gguf",
        str(tmp_path / "m.gguf"), "--llama-server", str(program(tmp_path)), "--unfused",
        "--output", str(out),
    ])  # fmt: skip
    [row] = Result.load(out).figures["rows"]
    assert row["llama_server"]["new_tokens"] == row["together"]["new_tokens"] == 6
    assert "-fa off --cache-type-k f16" in (tmp_path / "seen").read_text()
    assert report.settings["llama_server"] == "llama-server"
    assert report.settings["gguf"] == "m.gguf"
    assert str(tmp_path) not in out.read_text()


def test_the_finest_cache_that_fits_is_taken() -> None:
    tokens = 2 * 53
    assert cache_type(SHAPE, tokens, FULL) == "f16"
    assert cache_type(SHAPE, tokens, FULL - 1) == "q8_0"
    assert cache_type(SHAPE, tokens, FULL * 34 // 64 - 1) == "q4_0"
    with pytest.raises(ConfigError, match="holds no 106 tokens"):
        cache_type(SHAPE, tokens, FULL // 4)
    assert cache_type(SHAPE, tokens, FULL, fused=False) == "f16"
    with pytest.raises(ConfigError, match="holds no 106 tokens"):
        cache_type(SHAPE, tokens, FULL - 1, fused=False)


def test_it_must_be_said_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--llama-server PROGRAM"):
        run(["--beside", "llama.cpp", "--output", str(tmp_path / "r.json")])
