"""Settings of a training run: a TOML file, read strictly, as plain frozen data."""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from penstock.core.errors import ConfigError
from training.gate import Gate

Attention = Literal["auto", "cudnn", "flash"]
_Section = TypeVar("_Section")


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A Qwen3 decoder (norms on queries and keys, SwiGLU, tied embeddings)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    positions: int
    rope_theta: float
    init_std: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of the curriculum: `steps` steps, each micro-batch of one of the `lengths`."""

    lengths: tuple[int, ...]
    """Tokens of a row, question and answer included; drawn evenly."""
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallStage(Stage):
    """A part of a recall run's curriculum."""

    mix: dict[str, float] | None = None
    """Share of each task in this stage; they add up to 1. None: the run's mix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """How a sample of the bench becomes a row of training tokens."""

    further_share: float
    """Most of a row that further questions about the same document may take, 0 to 1."""
    further_most: int
    """Most further questions in a row; a replay asks as many as fit."""
    answer_cap: float
    """Answers of more tokens than this weigh as much as one of so many."""
    answer_floor: float
    """Answers of fewer tokens than this weigh as much as one of so many; 0: each as it is."""
    other_weight: float
    """Weight of a token outside answers, where it counts."""
    other_share: float
    """Share of the tokens outside answers that count."""
    jump_share: float
    """Share of the rows whose positions jump."""
    jump_below: int
    """Only rows of fewer tokens than this."""
    jumps: int
    """Most jumps of a row."""
    state_weight: float = 1.0
    """The two tokens behind a "=" of an answer weigh so many times the others: a walker's value,
    and whether the walk goes on. All else in its step is said elsewhere already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Muon on matrices, AdamW on the embedding and the norms, one schedule for both."""

    matrix_rate: float
    matrix_momentum: float
    matrix_decay: float
    other_rate: float
    other_betas: tuple[float, float]
    warmup_steps: int
    decay_steps: int
    """Of decay to zero at the end; before that the rate is constant."""
    decay_power: float = 1.0
    """1: linear; 2: soon low and long so, the square of the share that is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What changes time and memory, and nothing that is learnt."""

    compile: bool
    """torch.compile of the two pieces of a layer around attention, on a GPU."""
    attention: Attention
    """Backend of scaled_dot_product_attention that is tried first, on a GPU."""
    graphs: bool = False
    """Steps as CUDA graphs, one for each shape of batch, on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A glance at the accuracy during training; `training.evaluate` measures it."""

    every_steps: int
    samples: int
    """Of each task and length."""
    lengths: tuple[int, ...]
    """Tokens of a prompt; only those that the stage's rows have reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What runs of every kind have."""

    name: str
    seed: int
    micro_batch_tokens: int
    """Of one forward and backward pass: `micro_batch_tokens // length` rows."""
    micro_batches: int
    """Passes whose gradients are added up for one step."""
    checkpoint_minutes: float
    model: Architecture
    stages: tuple[Stage, ...]
    mix: dict[str, float]
    """Share of each task among the rows that ask something; they add up to 1."""
    optimizer: Optimizer
    speed: Speed
    evaluation: Evaluation
    sharpen: float = 1.0
    """Attention's logits in the finished model, in times those in training (`training.sharpen`)."""

    @property
    def groups(self) -> list[str]:
        """What losses are told apart by."""
        return list(self.mix)

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        """The stage that a step (from 0) belongs to."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise AssertionError("a step after the last")

    def rate_at(self, step: int) -> float:
        """Factor of the learning rates in a step (from 0): warm-up, constant, decay."""
        plan = self.optimizer
        rising = (step + 1) / plan.warmup_steps if plan.warmup_steps else 1.0
        falling = (self.steps - step) / plan.decay_steps if plan.decay_steps else 1.0
        return min(1.0, rising, math.pow(falling, plan.decay_power))

    def scaled(self, factor: float) -> Self:
        """The same curriculum in `factor` times as many steps.

        Raises:
            ConfigError: `factor` is not positive.
        """
        if factor <= 0:
            raise ConfigError(f"--scale {factor:g} must be above 0")
        if factor == 1:
            return self
        stages = tuple(
            replace(stage, steps=max(1, round(stage.steps * factor))) for stage in self.stages
        )
        decay = round(self.optimizer.decay_steps * factor)
        return replace(self, stages=stages, optimizer=replace(self.optimizer, decay_steps=decay))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for comparing runs."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(RunSettings):
    """Everything that decides what a run of recall rows learns."""

    stages: tuple[RecallStage, ...]
    rows: Rows
    gate: Gate | None = None

    @property
    def groups(self) -> list[str]:
        """The tasks of all mixes, those of the run's own first."""
        return list(dict.fromkeys([*self.mix, *(t for s in self.stages for t in s.mix or ())]))

    def mix_at(self, step: int) -> dict[str, float]:
        """Share of each task in a step (from 0)."""
        stage = self.stage_at(step)
        assert isinstance(stage, RecallStage)
        return self.mix if stage.mix is None else stage.mix

    def scaled(self, factor: float) -> Self:
        """The same curriculum, and its gate, in `factor` times as many steps.

        Raises:
            ConfigError: `factor` is not positive.
        """
        scaled = RunSettings.scaled(self, factor)  # super() does not work in a class with slots
        gate = None if self.gate is None else self.gate.scaled(factor)
        return replace(scaled, gate=gate)


SECTIONS: dict[str, Any] = {
    "model": Architecture, "optimizer": Optimizer, "speed": Speed, "evaluation": Evaluation
}  # fmt: skip
"""Tables that every file has."""
_Run = TypeVar("_Run", bound=RunSettings)
_Result = TypeVar("_Result")


def read_settings(path: str | Path) -> Settings:
    """Read a TOML file of settings.

    Raises:
        ConfigError: the file cannot be read, or a setting is missing, unknown or impossible.
    """
    return read_strictly(path, _recall_settings)


def read_strictly(path: str | Path, make: Callable[[Mapping[str, Any]], _Run]) -> _Run:
    """Read a TOML file and check what is made of it.

    Raises:
        ConfigError: see `read_settings`.
    """

    def checked(content: Mapping[str, Any]) -> _Run:
        settings = make(content)
        _check(settings)
        return settings

    return read_table(path, checked)


def read_table(path: str | Path, make: Callable[[Mapping[str, Any]], _Result]) -> _Result:
    """Make something of a TOML file; what is wrong with it is said with the file's name.

    Raises:
        ConfigError: the file cannot be read, or `make` says so.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        return make(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _recall_settings(content: Mapping[str, Any]) -> Settings:
    gate_too = {"gate": Gate} if "gate" in content else {}
    sections = {**SECTIONS, "rows": Rows, **gate_too}
    settings = section(Settings, content, "the file", sections, RecallStage)
    for number, stage in enumerate(settings.stages, 1):
        if stage.mix is not None:
            check_mix(stage.mix, f"the mix of stage {number}")
    gate = settings.gate
    if gate is not None and (gate.step < 1 or gate.task not in settings.groups):
        raise ConfigError(f"[gate] needs a step above 0 and a task of the mixes, not {gate.task!r}")
    return settings


def section(
    kind: type[_Run], content: Mapping[str, Any], name: str, sections: Mapping[str, Any],
    stage: type[Stage] = Stage,
) -> _Run:  # fmt: skip
    """Settings from a file's content.

    Args:
        kind: of the settings.
        content: plain data.
        name: for what is said about mistakes.
        sections: dataclasses of the tables, by name.
        stage: dataclass of a stage.
    """
    plain = dict(content)
    stages: Sequence[Mapping[str, Any]] = plain.pop("stages", [])
    plain["stages"] = tuple(table(stage, one, "stages") for one in stages)
    for part, its_kind in sections.items():
        plain[part] = table(its_kind, plain.get(part, {}), part)
    return table(kind, plain, name)


def table(kind: type[_Section], content: Mapping[str, Any], name: str) -> _Section:
    """A dataclass from a table; lists become tuples. What has a default may be missing.

    Args:
        kind: the dataclass.
        content: of the table.
        name: for what is said about mistakes.

    Raises:
        ConfigError: a setting is unknown or missing.
    """
    known = fields(kind)  # type: ignore[arg-type]
    wanted = {field.name for field in known}
    if unknown := sorted(set(content) - wanted):
        raise ConfigError(f"{name} has no setting {unknown[0]!r}; it has {', '.join(wanted)}")
    needed = {field.name for field in known if field.default is MISSING}
    if missing := sorted(needed - set(content)):
        raise ConfigError(f"{name} lacks the setting {missing[0]!r}")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in content.items()})


def _check(settings: RunSettings) -> None:
    if not settings.stages or any(s.steps < 1 or not s.lengths for s in settings.stages):
        raise ConfigError("every stage needs lengths and at least one step")
    longest = max(max(stage.lengths) for stage in settings.stages)
    if longest > settings.micro_batch_tokens or longest > settings.model.positions:
        raise ConfigError(
            f"rows of {longest} tokens are longer than micro_batch_tokens or model.positions"
        )
    check_mix(settings.mix, "[mix]")
    if settings.micro_batches < 1 or settings.evaluation.every_steps < 1:
        raise ConfigError("micro_batches and evaluation.every_steps must be at least 1")
    if not 0 < settings.sharpen < math.inf:
        raise ConfigError(f"sharpen = {settings.sharpen} must be above 0")
    if settings.speed.attention not in get_args(Attention):
        raise ConfigError(f"speed.attention must be one of {', '.join(get_args(Attention))}")


def check_mix(mix: Any, name: str) -> None:
    """Refuse shares that do not add up to 1.

    Raises:
        ConfigError: they do not; says `name`.
    """
    if not isinstance(mix, dict) or not all(isinstance(s, int | float) for s in mix.values()):
        raise ConfigError(f"{name} must be a table of tasks with their shares")
    if min(mix.values(), default=0) < 0:
        raise ConfigError(f"the shares of {name} must not be below 0")
    if abs(sum(mix.values()) - 1) > 1e-6:
        raise ConfigError(f"the shares of {name} add up to {sum(mix.values()):g}, not 1")
