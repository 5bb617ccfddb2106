"""Settings of a prose run: what a run of recall rows has, and what a corpus needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ConfigError
from training.settings import SECTIONS, RunSettings, Stage, section

PROSE = "prose"
"""Group of the tokens of plain prose rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProseStage(Stage):
    """A part of the curriculum."""

    recall: float
    """Share of the rows that ask for something; the others are plain prose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPlan:
    """What is made of the corpus before the training."""

    vocabulary: int
    """Of the tokenizer, at most 65,536."""
    sample_mb: float
    """Millions of characters, spread over the corpus, that the tokenizer is trained on."""
    held_back: int
    """Documents, the corpus's last, that are only looked at during the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProseRows:
    """How rows are made and weighed."""

    answer_share: float
    """Share of a micro-batch's whole weight that answers have, whatever its rows' length."""
    answer_most: float
    """Most weight of an answer's token; a token of prose has 1."""
    document_weight: float
    """Weight of a token of real prose in a row that asks."""
    other_weight: float
    """Weight of other tokens: facts, questions."""
    other_wordings: float
    """Share of the needle rows that are not in the bench's wording."""
    further_share: float
    """Most of a row that further questions about the same document may take, 0 to 1; more where
    documents are there to be asked much about (`many_keys`, `quote`)."""
    jump_share: float
    """Share of the rows that ask whose positions jump."""
    jump_below: int
    """Only rows of fewer tokens than this."""
    jumps: int
    """Most jumps of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProseSettings(RunSettings):
    """Everything that decides what a prose run learns, besides the corpus's text."""

    stages: tuple[ProseStage, ...]
    corpus: CorpusPlan
    rows: ProseRows

    @property
    def groups(self) -> list[str]:
        """What losses are told apart by: plain prose, and the tasks."""
        return [PROSE, *self.mix]

    def recall_at(self, step: int) -> float:
        """Share of the rows that ask for something, in the stage of a step (from 0)."""
        stage = self.stage_at(step)
        assert isinstance(stage, ProseStage)
        return stage.recall


def prose_settings(content: Mapping[str, Any]) -> ProseSettings:
    """Settings from a file's content.

    Raises:
        ConfigError: a setting is missing, unknown or impossible.
    """
    sections = {**SECTIONS, "rows": ProseRows, "corpus": CorpusPlan}
    settings = section(ProseSettings, content, "the file", sections, ProseStage)
    if not 300 <= settings.corpus.vocabulary <= 1 << 16:
        raise ConfigError("corpus.vocabulary must be 300 to 65536")
    if not 0 <= settings.rows.answer_share < 1:
        raise ConfigError("rows.answer_share must be at least 0 and below 1")
    if any(not 0 <= stage.recall <= 1 for stage in settings.stages):
        raise ConfigError("every stage's recall must be 0 to 1")
    return settings
