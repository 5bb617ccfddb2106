"""A tuned config comes back as it was saved, finds the nearest solution, and refuses the rest."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, StorageError
from penstock.methods import KVSwap, Quest
from penstock.methods.search_space import fields_of
from penstock.methods.tuned_config import Figures, Solution, TunedConfig

PREDICTED: Figures = {
    "tokens_per_s": 12.5, "first_token_s": 3.0, "resident_bytes": 900, "read_bytes_per_token": 64.0,
    "kl": None,
}  # fmt: skip


def solution(batch: int, context: int, policy: str = "kvswap", **changes: Any) -> Solution:
    fields = fields_of(KVSwap(group_tokens=8, selected_tokens=400)) if policy == "kvswap" else {}
    return Solution(
        batch=batch, context=context, policy=policy, is_pick=policy == "kvswap",
        **{
            "fields": fields, "limit_bytes": 1000 * batch, "predicted": PREDICTED,
            "measured": {**PREDICTED, "kl": 0.01}, "reason": "It is the fastest.", **changes,
        },
    )  # fmt: skip


SOLUTIONS = (
    *(solution(batch, context) for batch in (1, 2, 4) for context in (4096, 8192)),
    solution(1, 4096, "loki"), solution(2, 8192, "loki"),
    solution(1, 8192, "quest"), solution(4, 4096, "quest", measured=None),
)  # fmt: skip
CONFIG = TunedConfig(
    model="recall", fingerprint="ab" * 16, disk="nvme", simulated=True, max_context=8192,
    max_batch=4, limit_bytes=4003, floor=0.05, adapter=None, explanation="Because.",
    versions={"penstock": "0.1.0", "torch": "2", "transformers": "5"}, solutions=SOLUTIONS,
    front=({"policy": "kvswap", "kl": 0.1},),
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    CONFIG.save(tmp_path / "config.json")
    return tmp_path / "config.json"


def one_line(call: Callable[[], object], kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_round_trip(path: Path) -> None:
    loaded = TunedConfig.load(path)
    assert loaded == CONFIG
    assert loaded.folder == path.parent
    assert [each.name for each in path.parent.iterdir()] == ["config.json"]
    replace(loaded, model="other").save(path)
    assert TunedConfig.load(path).model == "other"
    assert "folder" not in json.loads(path.read_text())


def test_a_solution_is_a_policy() -> None:
    assert SOLUTIONS[0].make_policy() == KVSwap(group_tokens=8, selected_tokens=400)
    assert SOLUTIONS[-1].make_policy() == Quest()
    assert SOLUTIONS[0].describe() == (
        "kvswap (group_tokens=8, selected_tokens=400) tuned for 1 x 4096"
    )
    assert SOLUTIONS[-1].describe() == "quest (defaults) tuned for 4 x 4096"


@pytest.mark.parametrize(
    ("batch", "tokens", "policy", "found"),
    [
        (1, 4096, None, (1, 4096, "kvswap")), (2, 8192, "auto", (2, 8192, "kvswap")),
        (1, 4097, None, (1, 8192, "kvswap")), (1, 10, None, (1, 4096, "kvswap")),
        (3, 5000, None, (4, 8192, "kvswap")), (3, 4096, "kvswap", (4, 4096, "kvswap")),
        (1, 4096, "quest", (4, 4096, "quest")), (4, 4096, "quest", (4, 4096, "quest")),
        (1, 8192, "quest", (1, 8192, "quest")), (4, 4097, "quest", (1, 8192, "quest")),
        (2, 100, "loki", (2, 8192, "loki")), (4, 100, "loki", (1, 4096, "loki")),
    ],
)  # fmt: skip
def test_the_exact_solution_or_the_nearest(
    batch: int, tokens: int, policy: str | None, found: tuple[int, int, str]
) -> None:
    each = CONFIG.solution(batch, tokens, policy)
    assert (each.batch, each.context, each.policy) == found


def test_every_sequence_has_the_same_budget() -> None:
    assert [CONFIG.limit_for(batch) for batch in (1, 2, 3, 4)] == [1000, 2001, 3002, 4003]
    assert "up to 4 sequences, and these are 5" in one_line(lambda: CONFIG.limit_for(5))


@pytest.mark.parametrize(
    ("batch", "tokens", "policy", "parts"),
    [
        (1, 8193, None, ("up to 8192 tokens", "8193", "run penstock tune recall again")),
        (5, 100, None, ("up to 4 sequences", "5", "run penstock tune recall again")),
        (1, 100, "h2o", ("no solution of h2o, only of kvswap, loki, quest", "run penstock tune")),
    ],
)
def test_what_was_not_tuned_for_is_refused(
    batch: int, tokens: int, policy: str | None, parts: tuple[str, ...]
) -> None:
    message = one_line(lambda: CONFIG.solution(batch, tokens, policy))
    assert [part for part in parts if part not in message] == []


def test_a_policy_without_a_long_enough_solution_is_refused() -> None:
    short = replace(CONFIG, solutions=(*SOLUTIONS[:-2], SOLUTIONS[-1]))
    assert short.solution(1, 4096, "quest").context == 4096
    assert "quest for up to 4096 tokens" in one_line(lambda: short.solution(1, 5000, "quest"))


def test_another_model_is_refused() -> None:
    CONFIG.check("ab" * 16)
    message = one_line(lambda: CONFIG.check("cd" * 16, "./mine"))
    assert "recall (fingerprint abababababab), not ./mine (cdcdcdcdcdcd)" in message
    assert "run penstock tune ./mine" in message


@pytest.mark.parametrize(
    ("disk", "simulated", "store"),
    [("emmc", True, "emmc"), ("real", False, "auto"), ("host", False, "host"),
     ("memory", False, "memory")],
)  # fmt: skip
def test_the_disk_is_a_store(disk: str, simulated: bool, store: str) -> None:
    assert replace(CONFIG, disk=disk, simulated=simulated).store == store


def test_the_adapter_is_beside_the_config(path: Path) -> None:
    assert CONFIG.adapter_path is None
    replace(CONFIG, adapter="a.safetensors").save(path)
    assert TunedConfig.load(path).adapter_path == path.parent / "a.safetensors"


# Bad files -------------------------------------------------------------------------------------


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert f"there is no config {missing}" in one_line(lambda: TunedConfig.load(missing))
    assert "is a folder" in one_line(lambda: TunedConfig.load(tmp_path))
    for text, message in (
        ("", "is no JSON"), ("{", "is no JSON"), ("[" * 100_000, "is no JSON"),
        ("[]", "is no config"), ("3", "is no config"), ("{}", "is no config"),
        ('{"format": "penstock-result-1"}', "is no config"), ('{"format": 1}', "is no config"),
        ('{"format": "penstock-config-1"}', "lacks model, fingerprint"),
    ):  # fmt: skip
        (tmp_path / "bad.json").write_text(text)
        assert message in one_line(lambda: TunedConfig.load(tmp_path / "bad.json")), text
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    assert "is no JSON" in one_line(lambda: TunedConfig.load(tmp_path / "bad.json"))


@pytest.mark.parametrize("number", [0, 2])
def test_another_format_is_refused(path: Path, number: int) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "format": f"penstock-config-{number}"}))
    message = one_line(lambda: TunedConfig.load(path))
    assert f"made by penstock 0.1.0 in format penstock-config-{number}" in message
    assert message.endswith("run penstock tune again")
    path.write_text(json.dumps({"format": f"penstock-config-{number}"}))
    assert "made by another version" in one_line(lambda: TunedConfig.load(path))


@pytest.mark.parametrize("key", Figures.__annotations__)
def test_every_figure_is_needed(path: Path, key: str) -> None:
    document = json.loads(path.read_text())
    del document["solutions"][2]["predicted"][key]
    path.write_text(json.dumps(document))
    assert "solution 3: predicted=" in one_line(lambda: TunedConfig.load(path))


def test_every_key_is_needed(path: Path) -> None:
    whole = json.loads(path.read_text())
    for key in set(whole) - {"format"}:
        path.write_text(json.dumps({name: whole[name] for name in whole if name != key}))
        assert f"lacks {key};" in one_line(lambda: TunedConfig.load(path))
    for key in whole["solutions"][1]:
        document = json.loads(json.dumps(whole))
        del document["solutions"][1][key]
        path.write_text(json.dumps(document))
        assert f"solution 2 lacks {key};" in one_line(lambda: TunedConfig.load(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch": "4"}, "max_batch='4' makes no sense"),
        ({"max_batch": 0}, "a size below 1"),
        ({"max_context": True}, "max_context=True makes no sense"),
        ({"floor": "low"}, "floor='low' makes no sense"),
        ({"solutions": {}}, "solutions={} makes no sense"),
        ({"solutions": []}, "no solution that is a pick"),
        ({"solutions": [3]}, "solutions=[3] makes no sense"),
        ({"versions": {"torch": 2}}, "versions="),
        ({"adapter": "../a.safetensors"}, "adapter='../a.safetensors' is no name of a file"),
        ({"adapter": ""}, "adapter='' is no name"),
        ({"front": ["kvswap"]}, "front="),
        ({"explanation": None}, "explanation=None makes no sense"),
    ],
)
def test_values_that_make_no_sense(path: Path, changes: dict[str, Any], message: str) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert message in one_line(lambda: TunedConfig.load(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "magic"}, "solution 1: there is no policy 'magic'"),
        ({"fields": {"groups": 4}}, "solution 1: kvswap has no field 'groups'"),
        ({"fields": {"group_tokens": "4"}}, "solution 1: kvswap: group_tokens='4' is no value"),
        ({"fields": {"rank": 0}}, "solution 1: kvswap: rank=0"),
        ({"fields": []}, "solution 1: fields=[] makes no sense"),
        ({"is_pick": 1}, "solution 1: is_pick=1 makes no sense"),
        ({"batch": 1.0}, "solution 1: batch=1.0 makes no sense"),
        ({"reason": "x" * 99, "policy": ["x" * 99]}, "..."),
    ],
)
def test_solutions_that_make_no_sense(path: Path, changes: dict[str, Any], message: str) -> None:
    document = json.loads(path.read_text())
    document["solutions"][0].update(changes)
    path.write_text(json.dumps(document))
    assert message in one_line(lambda: TunedConfig.load(path))


def test_what_is_not_known_is_passed_over(path: Path) -> None:
    document = json.loads(path.read_text())
    document["note"] = document["solutions"][0]["note"] = "by hand"
    path.write_text(json.dumps(document))
    assert TunedConfig.load(path) == CONFIG


# Writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "none/config.json", "pipe", "pipe/config.json"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    bad = tmp_path / place
    message = one_line(lambda: CONFIG.save(bad), StorageError)
    assert f"cannot write the config to {bad}" in message
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_write_that_fails_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.replace", refuse)
    changed = replace(CONFIG, model="other")
    message = one_line(lambda: changed.save(path), StorageError)
    assert message.endswith("Read-only file system")
    assert TunedConfig.load(path) == CONFIG
    assert [each.name for each in path.parent.iterdir()] == ["config.json"]
