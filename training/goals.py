"""Goals at a run's end: losses that say whether it came as far as the runs that a card is of."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Goals:
    """What a task may have at most when the run is over. Some tasks come late with some seeds."""

    steps: int
    """The last ones, whose losses are averaged: one look's are of few rows."""
    losses: Mapping[str, float]
    """By task, nats a token."""

    def scaled(self, factor: float) -> "Goals":
        """Of a run with `factor` times as many steps."""
        return replace(self, steps=max(1, round(self.steps * factor)))

    def reached(self, records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """What a run's last steps have, by task; tasks that were not asked then are left out.

        Args:
            records: of its log, in their order.
        """
        looks = [record for record in records if record["kind"] == "train"]
        end = looks[-1]["step"] if looks else 0
        seen: dict[str, list[float]] = {}
        for look in looks:
            for task in self.losses.keys() & look["by_task"].keys():
                if look["step"] > end - self.steps:
                    seen.setdefault(task, []).append(look["by_task"][task])
        return {task: sum(seen[task]) / len(seen[task]) for task in self.losses if task in seen}

    def missed(self, log: Path) -> list[str]:
        """One line for each goal that was not reached; a loss that is no number is none.

        Args:
            log: JSONL, a record a line.
        """
        lines = log.read_text(encoding="utf-8").splitlines()
        reached = self.reached(json.loads(line) for line in lines)
        return [
            f"{task} has {loss:.2g} nats a token at the end, not {self.losses[task]:g} as the "
            "run of the card"
            for task, loss in reached.items() if not loss <= self.losses[task]
        ]  # fmt: skip
