"""Settings of a video run: what every run has, and what clips, frames and a vision tower need."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.core.errors import ConfigError
from training.clips import TASKS, Cast
from training.gate import Gate
from training.settings import SECTIONS, RunSettings, Stage, check_mix, section


@dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """A Qwen3-VL vision tower; a frame's patches see each other, and four become a token."""

    depth: int
    hidden: int
    heads: int
    feed_forward: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoStage(Stage):
    """A part of a video run's curriculum."""

    sides: tuple[int, ...]
    """Cells (visual tokens) of a frame's side; drawn evenly."""
    shares: tuple[float, ...]
    """Of a row, that the clip takes at least; questions have the rest. Drawn evenly."""
    mix: dict[str, float] | None = None
    """Share of each task in this stage; they add up to 1. None: the run's mix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoRows:
    """How rows are made and weighed."""

    questions: int
    """Most tokens of a row that questions and answers have: a clip has only so much to ask."""
    answer_floor: float
    """Answers of fewer tokens than this weigh as much as one of so many; 0: each as it is."""
    other_weight: float
    """Weight of a token of text outside answers, where it counts."""
    other_share: float
    """Share of the tokens of text outside answers that count."""
    jump_share: float
    """Share of the rows whose positions jump between frames."""
    jumps: int
    """Most jumps of a row."""
    jump_to: int
    """Positions that a row with jumps may reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSettings(RunSettings):
    """Everything that decides what a video run learns."""

    stages: tuple[VideoStage, ...]
    vision: Vision
    cast: Cast
    rows: VideoRows
    gate: Gate | None = None

    @property
    def groups(self) -> list[str]:
        """What losses are told apart by: the tasks."""
        return list(TASKS)

    def video_stage_at(self, step: int) -> VideoStage:
        """The stage that a step (from 0) belongs to."""
        stage = self.stage_at(step)
        assert isinstance(stage, VideoStage)
        return stage

    def scaled(self, factor: float) -> Self:
        """The same curriculum, and its gate, in `factor` times as many steps.

        Raises:
            ConfigError: `factor` is not positive.
        """
        scaled = RunSettings.scaled(self, factor)  # super() does not work in a class with slots
        return replace(scaled, gate=None if self.gate is None else self.gate.scaled(factor))


def video_settings(content: Mapping[str, Any]) -> VideoSettings:
    """Settings from a file's content.

    Raises:
        ConfigError: a setting is missing, unknown or impossible.
    """
    gate_too = {"gate": Gate} if "gate" in content else {}
    sections = {**SECTIONS, "vision": Vision, "cast": Cast, "rows": VideoRows, **gate_too}
    settings = section(VideoSettings, content, "the file", sections, VideoStage)
    for number, stage in enumerate(settings.stages, 1):
        if not stage.sides or min(stage.sides) < 1:
            raise ConfigError(f"stage {number} needs sides of at least 1")
        if not stage.shares or not all(0 < share < 1 for share in stage.shares):
            raise ConfigError(f"stage {number} needs shares between 0 and 1")
        if stage.mix is not None:
            check_mix(stage.mix, f"the mix of stage {number}")
    named = [*settings.mix, *(task for stage in settings.stages for task in stage.mix or ())]
    if settings.gate is not None:
        named.append(settings.gate.task)
    for task in named:
        if task not in TASKS:
            raise ConfigError(f"no task is called {task!r}; there are {', '.join(TASKS)}")
    return settings
