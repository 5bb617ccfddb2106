"""Exact match by task and length: samples made ahead by processes, marked in padded batches.

An answer is right when every token of it, `<eos>` included, is the likeliest one behind the right
tokens before it (as in `training.examine`). Rows are padded behind their end, where nothing that
is looked at can see it: causal attention gives a row the same logits in any batch, up to rounding.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.answers import answer, ask
from penstock.evaluate.intervals import wilson
from penstock.evaluate.progress import Progress
from penstock.evaluate.tasks import Sample, judge, score
from penstock.models.loader import LoadedModel
from training.ahead import do_ahead
from training.asked import Asked, Asker, Job
from training.model import attention_backend

_CHUNK = 4096
_BATCH_TOKENS = 32_768
_BLOCK = 20
"""Samples of a cell before the next cell's turn, so that a time limit cuts all cells alike."""
_SAY_S = 3.0


@dataclass(kw_only=True)
class Cell:
    """One task at one length."""

    task: str
    tokens: int
    """Most tokens of a prompt."""
    asked: int = 0
    exact: int = 0
    answer_tokens: int = 0
    right_tokens: int = 0
    leading_tokens: int = 0
    """Before the first wrong one of each answer: so far, greedy decoding would have come."""
    generated: int = 0
    """Samples that were answered by decoding, too."""
    generated_exact: int = 0
    generated_right: int = 0
    """By the task's own measure, which may leave the order open."""
    refused: str = ""
    """Why there is none."""

    def figures(self) -> dict[str, Any]:
        """Plain data, with the exact share's 95 % interval."""
        share = wilson(self.exact, self.asked)
        return {**asdict(self), "low": round(share.low, 4), "high": round(share.high, 4)}


@dataclass(frozen=True, slots=True)
class Mark:
    """How an answer was."""

    right_tokens: int
    leading_tokens: int
    tokens: int


@torch.no_grad()
def mark_batch(model: Any, batch: Sequence[Asked]) -> list[Mark]:
    """Let a model guess every token of some answers, in one forward pass.

    Args:
        model: a causal language model of transformers.
        batch: at least one; rows are padded behind their ends to the longest.
    """
    embedding = model.get_input_embeddings().weight
    longest = max(len(asked.ids) for asked in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int32)
    places = []
    for row, asked in enumerate(batch):
        length = len(asked.ids)
        ids[row, :length] = torch.from_numpy(asked.ids)
        places.append(torch.arange(length - asked.answer_tokens, length) + row * longest)
    where = torch.cat(places)
    targets = ids.flatten()[where].to(embedding.device)
    put = ids.to(embedding.device)
    # Every batch has a length of its own, and cuDNN plans anew for each length.
    with attention_backend("flash" if put.is_cuda else "auto"):
        hidden = model.base_model(input_ids=put, use_cache=False).last_hidden_state
    seen = hidden.flatten(0, 1).index_select(0, where.to(embedding.device) - 1)
    right = (model.get_output_embeddings()(seen).argmax(-1) == targets).cpu()
    rows = right.split([asked.answer_tokens for asked in batch])
    return [Mark(int(row.sum()), int(row.int().cumprod(0).sum()), len(row)) for row in rows]


class CellRun:
    """Fills cells.

    Args:
        loaded: the model.
        cells: to fill, in the order in which they take turns.
        samples: of each cell.
        generate_most: longest answer in tokens that is also decoded greedily through a cache of
            Penstock, with everything in memory, where the asker has kept the sample.
    """

    def __init__(
        self, loaded: LoadedModel, cells: Sequence[Cell], *, samples: int, generate_most: int = 0
    ) -> None:
        self.cells = list(cells)
        self._loaded, self._samples = loaded, samples
        self._generate_most = generate_most

    def run(
        self, build: Callable[..., Asker], given: tuple[Any, ...], *, workers: int,
        keep: Callable[[], None], end: float = float("inf"),
    ) -> None:  # fmt: skip
        """Ask everything, until it is done or the time is up.

        Args:
            build: makes the asker, in every process; and `given`, its arguments.
            workers: processes that make samples; 0: they are made here.
            keep: called now and then, to save what there is.
            end: on the clock of time.perf_counter.

        Raises:
            AheadError: a process died.
        """
        progress = Progress(sum(cell.tokens for cell in self.cells) * self._samples)
        said = time.perf_counter()
        for batch in self._batches(do_ahead(build, given, self._jobs(), workers=workers)):
            if time.perf_counter() > end:
                return
            cell = self.cells[batch[0].job.cell]
            self._examine(cell, batch)
            progress.step(cell.tokens * len(batch))
            if time.perf_counter() - said > _SAY_S:
                number = batch[-1].job.number + 1
                progress.say(f"sample {number}, {cell.tokens} tokens, {cell.task}")
                keep()
                said = time.perf_counter()

    def _jobs(self) -> Iterator[Job]:
        for first in range(0, self._samples, _BLOCK):
            for at, cell in enumerate(self.cells):
                for number in range(first, min(first + _BLOCK, self._samples)):
                    if not cell.refused:  # known by now, or found out once more
                        yield Job(at, cell.task, cell.tokens, number)

    def _batches(self, made: Iterator[Asked]) -> Iterator[list[Asked]]:
        """Neighbours of one cell, as many as fit; what was refused is noted and left out."""
        batch: list[Asked] = []
        for asked in made:
            cell = self.cells[asked.job.cell]
            cell.refused = cell.refused or asked.refused
            if cell.refused:
                continue
            longest = max(len(one.ids) for one in [*batch, asked])
            full = longest * (len(batch) + 1) > _BATCH_TOKENS
            if batch and (full or batch[0].job.cell != asked.job.cell):
                yield batch
                batch = []
            batch.append(asked)
        if batch:
            yield batch

    def _examine(self, cell: Cell, batch: Sequence[Asked]) -> None:
        guessed = [asked for asked in batch if not asked.only_decoded]
        for marked in mark_batch(self._loaded.model, guessed) if guessed else ():
            cell.asked += 1
            cell.exact += marked.right_tokens == marked.tokens
            cell.answer_tokens += marked.tokens
            cell.right_tokens += marked.right_tokens
            cell.leading_tokens += marked.leading_tokens
        for asked in batch:
            sample = asked.sample
            if sample is not None and asked.answer_tokens <= self._generate_most:
                said = self._say(sample)
                cell.generated += 1
                cell.generated_exact += int(score(sample, said))
                cell.generated_right += judge(sample, said) == 1.0

    def _say(self, sample: Sample) -> str:
        """The model's own answer, with everything in memory."""
        question = ask(self._loaded, [sample])
        setting = parse_setting("full")
        return answer(self._loaded, question, setting, chunk=_CHUNK, shared=None).texts[0]
