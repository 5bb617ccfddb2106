"""Jobs of the accuracy benchmark: a batch of one task's samples, asked under every setting left."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.core.errors import BudgetError, ConfigError
from penstock.evaluate.accuracy_cells import Cell
from penstock.evaluate.accuracy_settings import Setting, parse_settings
from penstock.evaluate.answers import SharedPrefill, answer, ask
from penstock.evaluate.tasks import FileTasks, GeneratedTasks, TaskSource
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load

_TELL_S = 5.0
"""How often it is told how far the prompts are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Who is asked, and how; plain data, so that it can be sent to another process."""

    model: str
    device: str
    dtype: str | None
    data: str | None
    """JSONL file or folder instead of generated tasks."""
    haystack: tuple[str, ...]
    """Texts that generated English tasks are hidden in."""
    chat: bool
    chunk: int
    """Tokens per forward pass of a prompt."""
    own_prefill: bool
    store: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Samples of one task at one length; each document is prefilled once for all settings."""

    length: int
    """Most tokens of a prompt."""
    task: str
    first: int
    """Number of the first sample."""
    count: int
    settings: tuple[str, ...]
    """Those that have not answered these samples yet."""

    @property
    def title(self) -> str:
        """For progress lines."""
        return f"{self.length} {self.task} {self.first + 1} to {self.first + self.count}"


class Examiner:
    """Has the model and the tasks, and does one job after the other."""

    def __init__(self, examination: Examination) -> None:
        """Load the model.

        Raises:
            ConfigError: the model has no tokenizer, or the files cannot be used.
            ModelLoadError: the model cannot be loaded.
        """
        self._how = examination
        self._loaded: LoadedModel = load(
            examination.model, dtype=examination.dtype, device=examination.device
        )
        tokenizer = self._loaded.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{examination.model} has no tokenizer")
        self._source: TaskSource
        if examination.data:
            self._source = FileTasks(examination.data, tokenizer, chat=examination.chat)
        else:
            self._source = GeneratedTasks(
                tokenizer, chat=examination.chat, texts=examination.haystack
            )

    @property
    def weights(self) -> str:
        """The model's fingerprint: folders of one name may hold different ones."""
        return fingerprint(self._loaded.model)

    @property
    def tasks(self) -> Sequence[str]:
        """Names of all tasks."""
        return self._source.names

    @property
    def default_tasks(self) -> Sequence[str]:
        """Names of those that are asked if none is named."""
        return self._source.default_names

    def do(self, job: Job, tell: Callable[[str], None] = lambda _: None) -> Iterator[Cell]:
        """Ask a job's samples: one cell for each setting, as soon as it has answered.

        Nothing comes where a file has no such samples.

        Args:
            tell: gets what is going on before the first cell is there.
        """
        how = self._how
        samples = self._source.draw(
            job.task, job.first, job.count, tokens=job.length, seed=how.seed
        )
        if not samples:
            return
        question = ask(self._loaded, samples)
        shared = None
        tell("the prompts are being read")
        if not how.own_prefill:
            told = _now_and_then(tell, question.batch.padded_tokens)
            shared = SharedPrefill(self._loaded.model, question, how.chunk, told)
        for setting in _in_words(job.settings):
            cell = Cell(length=job.length, task=job.task, setting=setting.text)
            try:
                answers = answer(
                    self._loaded, question, setting, chunk=how.chunk, shared=shared,
                    store=how.store,
                )  # fmt: skip
            except BudgetError as error:
                cell.refused = str(error)
            else:
                cell.add(question, answers)
            yield cell


def _now_and_then(tell: Callable[[str], None], tokens: int) -> Callable[[int], None]:
    """Of many tokens read, word every `_TELL_S`."""
    last = time.perf_counter()

    def read(count: int) -> None:
        nonlocal last
        if time.perf_counter() - last >= _TELL_S:
            tell(f"{count:,} of {tokens:,} tokens read")
            last = time.perf_counter()

    return read


def _in_words(texts: Sequence[str]) -> list[Setting]:
    return [setting for text in texts for setting in parse_settings([text])]
