"""`python -m research.hosts`: what one host measures, and what many do by it."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.result import Result
from research.hosts import program, single
from research.hosts.simulation import POLICIES, Scenario, Simulation, Single
from tests.research.drawn_figures import figures_drawn

ONE = Single(first_s=[0.5, 0.6], prefill_s=[20.0], step_s=[0.1, 0.2], document_bytes=50_000_000)


def test_one_host_is_measured(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the sky is blue . the grass is green . " * 80)
    few = [f"--text={text}", "--tokens=256", "--answer=4", "--memory=8MiB"]
    found = single.run([*few, "--documents=2", "--opens=2"]).figures
    assert len(found["stored"]) == 2
    assert len(found["first_token_s"]) == 4
    assert len(found["step_s"]) <= 4 * 3
    for one in found["stored"]:
        assert one["bytes"] > one["tokens"] * 1024
    with pytest.raises(PromptError, match="give more --text"):
        single.run([*few, "--documents=9"])


def simulated(policy: str, **more: Any) -> dict[str, Any]:
    few: dict[str, Any] = {"hosts": 20, "documents": 400, "requests": 1500}
    return Simulation(Scenario(policy=policy, **few | more), ONE, seed=1).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_once_and_alike_again(policy: str) -> None:
    found = simulated(policy, lost=2)
    assert found == simulated(policy, lost=2)
    assert found["counted"] == 1200
    assert found["hit_rate"] + found["copied"] + found["prefilled"] == pytest.approx(1)
    assert found["restarted"] > 0
    assert found["first_p50_s"] <= found["first_p99_s"] <= found["first_p999_s"]


def test_what_a_way_to_route_costs() -> None:
    bounded, plain, drawn, least = (simulated(policy, skew=0.9) for policy in POLICIES)
    assert plain["hit_rate"] == 1 > bounded["hit_rate"] > max(drawn["hit_rate"], least["hit_rate"])
    assert plain["first_p99_s"] > 5 * bounded["first_p99_s"], "one host has what all ask for"
    assert plain["sent_bytes"] == 0
    assert drawn["sent_bytes"] >= ONE.document_bytes * drawn["copied"] * drawn["counted"]
    slow = simulated("least", skew=0.9, network_bytes_s=1e7)
    assert slow["first_p99_s"] > least["first_p99_s"] + 5, "a copy takes 5 s"
    assert simulated("bounded", load=0.2, skew=0)["first_p999_s"] < 1, "nothing waits"


def test_a_lost_host_costs_prefills_where_there_was_one_copy() -> None:
    one, two = (simulated("plain", load=0.3, lost=1, copies=copies) for copies in (1, 2))
    assert one["prefilled"] > 0 == two["prefilled"]
    assert one["rebalanced_bytes"] == 0 < two["rebalanced_bytes"]
    # Both copies of each of its documents were on two of 20 hosts: a tenth moves, or a little more.
    assert 0.05 < two["rebalanced_bytes"] / (400 * ONE.document_bytes) < 0.2
    assert two["rebalance_s"] > 0


def test_the_program_and_its_figure(tmp_path: Path) -> None:
    measured, out = tmp_path / "single.json", tmp_path / "hosts.json"
    result = Result.begin("hosts.single", [], {"model": "tiny"}, seed=0)
    result.figures = {
        "stored": [{"tokens": 9, "bytes": 50_000_000, "prefill_s": 20.0}],
        "first_token_s": [0.5], "step_s": [0.1],
    }  # fmt: skip
    result.save(measured)
    few = [f"--single={measured}", "--hosts=20", "--documents=100", "--requests=100"]
    with pytest.raises(ConfigError, match="no part rings"):
        program.run([*few, "--parts=rings"])
    figures = program.run([*few, f"--output={out}"]).figures
    assert str(tmp_path) not in out.read_text()
    fewer, more = figures["ring"]
    assert 1 / 21 / 2 < more["moved"] < 2 / 21
    assert fewer["moved_by_modulo"] > 0.9
    assert figures["document_bytes"] == 50_000_000
    assert len(figures["rows"]) == 24 + 20 + 12 + 12
    assert figures_drawn(out) == ["hosts"]
    with pytest.raises(ConfigError, match=r"not of hosts\.single"):
        program.run([f"--single={out}"])
