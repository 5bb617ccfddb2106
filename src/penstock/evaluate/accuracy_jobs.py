"""Jobs of the accuracy benchmark: a batch of one task's samples, asked under every setting left."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.core.errors import BudgetError, ConfigError
from penstock.evaluate.accuracy_cells import REFERENCE, Cell
from penstock.evaluate.accuracy_fidelity import follow_passages, read_passages
from penstock.evaluate.accuracy_settings import Setting, parse_settings
from penstock.evaluate.answers import SharedPrefill, answer, ask
from penstock.evaluate.tasks import FileTasks, GeneratedTasks, TaskSource
from penstock.evaluate.tasks.real.passages import FIDELITY
from penstock.evaluate.tasks.real.registry import RealTasks
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load
from penstock.models.model_shape import inspect_model

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
    packed: str | None = None
    """"int8" or "int4": weights are packed so; None: as stored."""
    real: bool = False
    """The tasks of suite real, and fidelity."""


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
    said: tuple[str, ...] | None = None
    """What full attention answered to these samples in an earlier job."""

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
            examination.model,
            dtype=examination.dtype,
            device=examination.device,
            weights=examination.packed,
        )
        tokenizer = self._loaded.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{examination.model} has no tokenizer")
        self._source: TaskSource
        if examination.real:
            positions = inspect_model(self._loaded.model).max_positions
            self._source = RealTasks(tokenizer, positions=positions)
        elif examination.data:
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
    def adapter_tokens(self) -> int | None:
        """Calibration tokens of the low-rank adapter that caches find by themselves, if any."""
        found = find_adapter(self.weights, self._loaded.model.name_or_path)
        return None if found is None else found.tokens

    @property
    def texts(self) -> str | None:
        """Tells other texts that ship apart; None where samples are not made of them."""
        return self._source.digest if isinstance(self._source, RealTasks) else None

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
        if isinstance(self._source, RealTasks) and job.task in FIDELITY:
            yield from self._follow(self._source, job, tell)
            return
        how, said = self._how, job.said
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
                if how.real and setting.text == REFERENCE:
                    said = tuple(answers.texts)
                cell.add(question, answers, said)
            yield cell

    def _follow(self, source: RealTasks, job: Job, tell: Callable[[str], None]) -> Iterator[Cell]:
        """Decode held-out texts under the job's settings, see `follow_passages`."""
        how = self._how
        rows = source.passages(
            job.task, job.first, job.count, tokens=job.length, seed=how.seed
        )  # fmt: skip
        told = _now_and_then(tell, len(rows[0]))
        tell("full attention reads and decodes")
        reference = read_passages(self._loaded, rows, chunk=how.chunk, on_tokens=told)
        for setting in _in_words(job.settings):
            cell = Cell(length=job.length, task=job.task, setting=setting.text)
            follow_passages(self._loaded, reference, setting, cell, store=how.store)
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
