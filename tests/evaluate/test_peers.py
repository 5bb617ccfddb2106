"""The driver of the peers table: limits, failures, rows and the table, without any peer."""

import importlib
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.evaluate.memory_cgroup import MemoryCgroup

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
MIB = 2**20
SCRIPTS = sorted(PEERS.glob("*.py"))


@pytest.fixture(autouse=True)
def _peers_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PEERS))
    yield
    for name in [path.stem for path in SCRIPTS]:
        sys.modules.pop(name, None)


def module(name: str) -> Any:
    return importlib.import_module(name)


def run_python(code: str, *, memory: int = 200 * MIB, extra: int = 0, timeout: float = 60) -> Any:
    limited = module("limited_process")
    limits = limited.Limits(memory_bytes=memory, data_extra_bytes=extra, timeout_s=timeout)
    return limited.run_limited([sys.executable, "-c", code], limits, dict(os.environ))


def lives(pid: str) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def ending(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "failure": None, "kind": "", "phase": "decode", "peak_bytes": 5, "seconds": 1.0,
        "output": "",
    }  # fmt: skip
    return module("limited_process").Ending(**{**fields, **changes})


def test_a_process_within_its_limits() -> None:
    end = run_python("import json; print('noise'); print(json.dumps({'step_s': [0.5]}))")
    assert end.failure is None
    assert module("peer_rows").parse_reply(end.output) == {"step_s": [0.5]}


def test_too_much_memory_bit_by_bit_is_seen_and_stopped() -> None:
    code = (
        "import sys, time; held = []; print('phase: fill', file=sys.stderr, flush=True)\n"
        "while True: held.append(b'x' * (10 << 20)); time.sleep(0.02)"
    )
    end = run_python(code, extra=1 << 34)
    assert (end.kind, end.phase) == ("memory", "fill")
    assert end.peak_bytes > 200 * MIB
    assert "GiB resident" in end.failure


def test_too_much_memory_at_once_is_refused() -> None:
    end = run_python("held = b'x' * (1 << 30)")
    assert (end.kind, end.failure) == ("memory", "MemoryError")


def test_too_much_time() -> None:
    end = run_python("import time; time.sleep(60)", timeout=0.5)
    assert (end.kind, end.failure) == ("time", "not ready after 0 s")


def test_the_last_line_of_an_error_is_kept() -> None:
    code = "import sys; sys.stderr.write('phase: load\\n'); raise ValueError('no such thing')"
    end = run_python(code)
    assert (end.kind, end.phase, end.failure) == ("error", "load", "ValueError: no such thing")


def test_children_end_with_the_process(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(child.pid))"
    )
    assert run_python(code).failure is None
    deadline = time.monotonic() + 60
    while lives(mark.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_control_group_is_limited_joined_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.limit_in_bytes").write_text("9")
    limited = module("limited_process")
    groups: list[MemoryCgroup] = []

    def make(parent: Path) -> MemoryCgroup:
        groups.append(MemoryCgroup(parent))
        return groups[0]

    monkeypatch.setattr(limited, "MemoryCgroup", make)
    limits = limited.Limits(memory_bytes=77 * MIB, timeout_s=60, cgroup=tmp_path)
    end = limited.run_limited([sys.executable, "-c", "pass"], limits, dict(os.environ))
    assert end.failure is None
    [group] = groups
    assert (group.path / "memory.limit_in_bytes").read_text() == str(77 * MIB)
    joined = int((group.path / "cgroup.procs").read_text())
    assert joined != os.getpid()
    assert limits.how == "memory control group"


def test_failures_become_rows_without_paths() -> None:
    rows = module("peer_rows")
    row = rows.PeerRow(peer="ollm", setting="disk", context=8)
    bad = ending(failure="FileNotFoundError: '/secret/place/file.py' is not there", kind="error")
    assert row.take("speed", bad, 100) is None
    assert row.failures["speed"]["error"] == "FileNotFoundError: 'file.py' is not there"
    assert row.take("recall", ending(output="nothing"), 100) is None
    assert row.failures["recall"]["error"] == "no reply"
    text = rows.peers_table([row])
    assert "ollm disk" in text
    assert "FAILED (error) in decode: FileNotFoundError" in text


def test_a_peak_that_was_not_seen_fails_the_row() -> None:
    rows = module("peer_rows")
    row = rows.PeerRow(peer="kvpress", setting="knorm", context=8)
    late = ending(output=json.dumps({"step_s": [1.0], "load_peak_bytes": 101}))
    assert row.take("speed", late, 100) is None
    assert row.failures["speed"]["kind"] == "memory"


def test_rows_and_table() -> None:
    rows = module("peer_rows")
    plain = [{"answer_ids": [5, 6], "eos_id": 2}, {"answer_ids": [7], "eos_id": 2}]
    prepared = module("prepared")
    samples = prepared.Samples(
        Path(), plain, lambda ids, index: float(prepared.is_right(ids, plain[index]))
    )
    row = rows.PeerRow(peer="penstock", setting="kvswap", context=8192)
    row.take_speed({
        "step_s": [0.1, 0.2, 0.3], "decode_peak_bytes": 2**31, "fill_peak_bytes": 2**30,
        "fill_s": 4.0,
    })  # fmt: skip
    row.take_recall({"answers": [[5, 6, 2], [8, 2]], "answer_s": [1.0, 1.0]}, samples)
    row.take_prompt({"prompt_s": 64.0})
    row.planned = {"tokens_per_s": 6.0}
    assert row.speed["tokens_per_s"] == pytest.approx(5.0)
    assert (row.recall["right"], row.recall["answered"]) == (1, 2)
    assert row.recall["scores"] == [1.0, 0.0]
    other = rows.PeerRow(peer="ollm", setting="disk", context=8192)
    other.fail("recall", "time", "answer 1", "not ready after 9 s")
    text = rows.peers_table([row, other])
    [line] = [line for line in text.splitlines() if line.startswith("penstock kvswap")]
    assert line.split() == [
        "penstock", "kvswap", "5.00", "200", "100", "300", "2.00", "1.00", "-", "4",
        "128", "6.00", "1/2",
    ]  # fmt: skip
    assert json.dumps(row.as_dict())
    assert "not ready after 9 s" in text


def test_an_environment_that_cannot_be_built_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = module("run")

    def refuse(*_: Any, **__: Any) -> Path:
        raise run.InstallError("ERROR: nothing matches")

    monkeypatch.setattr(run, "build", refuse)
    out = tmp_path / "peers.json"
    code = run.main([
        "--lengths=512", "--peers=ollm", "--samples=2", "--config=tiny", f"--out={out}",
        f"--store={tmp_path}", f"--envs={tmp_path}",
    ])  # fmt: skip
    assert code == 0
    shown = capsys.readouterr().out
    assert "FAILED (install) in install: ERROR: nothing matches" in shown
    result = module("penstock.evaluate.result").Result.load(out)
    assert result.command == (
        "python benchmarks/peers/run.py --lengths 512 --peers ollm --config tiny --samples 2"
    )
    assert str(tmp_path) not in out.read_text()
    assert "RLIMIT_DATA" in result.settings["memory_limit"]
    [row] = result.figures["rows"]
    assert row["failures"]["recall"]["kind"] == "install"
    lines = (tmp_path / "samples-512.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        assert 0 < sample["question_start"] < len(sample["prompt_ids"]) <= 512
    config = json.loads((tmp_path / "tiny-seed0" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0


def test_a_whole_row_with_a_pretended_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = module("run")
    (tmp_path / "pretender.py").write_text(
        f"import os, sys, time; sys.path.insert(0, {str(PEERS)!r})\n"
        "from protocol import answer_samples, serve, time_steps\n"
        "def speed(request):\n"
        "    assert os.sched_getaffinity(0) == set(request.cores)\n"
        "    return {**time_steps(lambda: time.sleep(0.01), request), 'fill_s': 0.0,\n"
        "            'fill_peak_bytes': 1, 'prefill': request.prefill}\n"
        "def recall(request):\n"
        "    return answer_samples(lambda sample: [*sample['answer_ids'], 2], request)\n"
        "serve(speed, recall)\n"
    )
    pretender = run.PEERS["ollm"].__class__(script="pretender.py", settings=("one",))
    monkeypatch.setattr(run, "PEERS", {"ollm": pretender})
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "build", lambda *_, **__: Path(sys.executable))
    out = tmp_path / "peers.json"
    core = min(os.sched_getaffinity(0))
    arguments = [
        "--lengths=512", "--peers=ollm", "--samples=2", "--config=tiny", "--steps=4",
        f"--out={out}", f"--store={tmp_path}", "--threads=1", f"--cores={core}", "--parallel=2",
    ]  # fmt: skip
    assert run.main([*arguments, "--jobs=speed"]) == 0
    first = json.loads(out.read_text())
    assert first["figures"]["rows"][0]["recall"] == {}
    assert run.main([*arguments, "--jobs=recall", "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "ollm one" in shown
    assert "2/2" in shown
    both = json.loads(out.read_text())
    [row] = both["figures"]["rows"]
    assert row["speed"] == first["figures"]["rows"][0]["speed"], "not measured again"
    assert both["settings"]["jobs"] == ["speed", "recall"]
    assert "; then python" in both["command"]
    assert both["command"].endswith(f"--parallel 2 --cores {core} --resume")
    assert run.main([*arguments, "--resume", "--samples=3"]) == 2, "other samples"
    assert "--samples 2" in capsys.readouterr().err


def test_a_models_place_is_not_told() -> None:
    run = module("run")
    parser = run.make_parser()
    args = parser.parse_args(["--recall-model=/home/me/models/small", "--samples=3"])
    assert run.public_command(parser, args).endswith("--recall-model small --samples 3")
    assert run.shown_value(args, "recall_model") == "small"
    assert run.shown_value(parser.parse_args([]), "recall_model") == "recall"


def test_rows_at_once_have_cores_of_their_own() -> None:
    lanes = module("lanes")
    cores = lanes.parse_cores("3-6,9")
    assert [lane.cores for lane in lanes.make_lanes(cores, 2, 9)] == [(3, 4), (5, 6)]
    with pytest.raises(module("penstock.core.errors").ConfigError, match="6 threads"):
        lanes.make_lanes(cores, 6, 1)
    begun, seen = threading.Barrier(2), []

    def work(lane: Any) -> None:
        begun.wait(timeout=60)  # the two are there together
        seen.append(lane.cores)

    lanes.run_in_lanes(lanes.make_lanes(cores, 2, 2), [work] * 4)
    assert sorted(seen) == [(3, 4), (3, 4), (5, 6), (5, 6)]

    def fail(lane: Any) -> None:
        raise OSError("this lane")

    done: list[Any] = []
    with pytest.raises(OSError, match="this lane"):
        lanes.run_in_lanes(lanes.make_lanes([], 2, 1), [fail, done.append])


def state_file(path: Path, cells: int, *, transposed: int = 0, version: int = 3) -> None:
    """A saved sequence as llama.cpp writes it: one layer, keys of 2 bytes and values of 3."""
    parts = [struct.pack("<IIIII", 0x67677371, version, 0, 1, cells)]
    parts += [struct.pack("<iIi", index, 1, 0) for index in range(cells)]
    parts += [struct.pack("<IIiQ", transposed, 1, 1, 2), bytes(range(2 * cells))]
    parts += [struct.pack("<iII", 1, 1, 3) if transposed else struct.pack("<iQ", 1, 3)]
    parts += [bytes(range(3 * cells))]
    path.write_bytes(b"".join(parts))


def test_a_state_is_widened(tmp_path: Path) -> None:
    state = module("llama_state")
    short, long, again = tmp_path / "short", tmp_path / "long", tmp_path / "again"
    state_file(short, 4)
    state.widen(short, long, 10)
    data = long.read_bytes()
    assert struct.unpack_from("<IIIII", data)[-1] == 10
    assert [struct.unpack_from("<iIi", data, 20 + 12 * i) for i in (0, 9)] == [(0, 1, 0), (9, 1, 0)]
    keys = data[20 + 120 + 20 :][:20]
    assert keys == bytes([*range(8), *range(8), *range(4)])
    state.widen(short, again, 4)
    assert again.read_bytes() == short.read_bytes()

    state_file(short, 4, transposed=1)
    state.widen(short, long, 6)
    values = long.read_bytes()[20 + 72 + 20 + 12 + 12 :]
    assert values == b"".join(bytes([*row, *row[:2]]) for row in batched(range(12), 4))


def batched(values: range, size: int) -> list[range]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def test_a_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    state = module("llama_state")
    state_file(tmp_path / "short", 2, version=9)
    with pytest.raises(state.StateFormatError):
        state.widen(tmp_path / "short", tmp_path / "long", 4)


def test_page_cache_of_a_folder(tmp_path: Path) -> None:
    protocol = module("protocol")
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    assert protocol.page_cache_bytes(tmp_path) >= 100_000
    protocol.drop_page_cache(tmp_path)
    assert protocol.page_cache_bytes(tmp_path) <= 102_400


def test_every_environment_is_pinned_and_has_a_script() -> None:
    peers, environments = module("peer_rows").PEERS, module("environments")
    assert set(peers) == set(environments.ENVIRONMENTS)
    assert all((PEERS / peer.script).is_file() for peer in peers.values())
    for environment in environments.ENVIRONMENTS.values():
        for requirement in (*environment.requirements, *environment.alone):
            assert "==" in requirement


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_size(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert max(map(len, lines)) <= 100


def test_queries_go_to_gguf_as_they_come_back(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from transformers import LlamaConfig

    from penstock.models.packed.gguf_rows import _order_of

    names = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    config = LlamaConfig(**names)
    for name, rows in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)):
        weight = f"model.layers.0.self_attn.{name}.weight"
        stored = module("gguf_model")._in_order(
            weight, np.arange(rows * 3).reshape(rows, 3), {**names, "model_type": "llama"}
        )
        order = _order_of(weight, config)
        back = stored if order is None else stored[order]
        assert (order is None) == (name == "v_proj")
        assert (back == np.arange(rows * 3).reshape(rows, 3)).all()


def test_random_codes_are_a_model_for_both(tmp_path: Path) -> None:
    """What llama.cpp gets in place of weights that are too large is what Penstock packs."""
    gguf = pytest.importorskip("gguf")
    from transformers import LlamaConfig

    folder = tmp_path / "tiny-coded"
    LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, rope_theta=10000.0, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 10000.0}))
    file = module("packed_model").coded_file(folder)
    module("gguf_model").write_random(path, file)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    model = module("packed_model").packed_model(folder, "int4")
    up = stored["blk.0.ffn_up.weight"]
    plain = torch.from_numpy(gguf.quants.dequantize(up.data, up.tensor_type))
    mine = model.model.layers[0].mlp.up_proj
    out = mine(torch.eye(256, dtype=torch.bfloat16)).float().T
    assert 0.01 < float(plain.std()) < 0.03
    assert torch.allclose(out, plain, atol=1e-3)
    ends = stored["output.weight"]
    assert 0.005 < float(gguf.quants.dequantize(ends.data, ends.tensor_type).std()) < 0.03
