"""Hosts that fail, as a program: one trial and a few damaged frames."""

from pathlib import Path

from penstock.evaluate.result import Result
from tests import soak_devices


def test_a_trial_ends_and_is_told(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--trials", "1", "--seed", "10", "--frames", "20", "--output", str(out)]
    figures = soak_devices.run(arguments).figures
    assert Result.load(out).figures == figures
    [one] = figures["every"]
    assert (one["fault"], one["copies"], one["ended"]) == ("reset", 2, "right")
    assert figures["fuzz"]["others_scores_stay"]
