"""A trainer of video runs: rows with clips in them, and what is looked at during the run."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from training.clips import TASKS, draw_clip
from training.data import BOS
from training.feed import OnDevice
from training.model import Pieces, attention_backend, guess_logits
from training.trainer import GLANCE_SEED, Trainer
from training.video_data import Grid, clip_ids, video_positions
from training.video_model import Places, build, difference, patch_table, video_hidden
from training.video_questions import draw_prompt
from training.video_settings import VideoSettings


class VideoTrainer(Trainer):
    """A model in training on synthetic clips.

    Args:
        settings: of the run.
        vocabulary: words with their ids.
        device: see `Trainer`.

    Raises:
        TrainingError: see `Trainer`.
    """

    def __init__(
        self, settings: VideoSettings, vocabulary: Mapping[str, int], device: torch.device
    ) -> None:
        self._video = settings
        self._table = patch_table(settings.cast, device)
        self._places: dict[tuple[Grid, int], Places] = {}
        super().__init__(settings, vocabulary, device)

    def glance(self) -> Iterator[tuple[str, int, float, float]]:
        """Exact match on a few fresh clips of the stage's largest frames: task, visual tokens,
        exact share, token share."""
        stage = self._video.video_stage_at(max(0, self.steps_done - 1))
        side, longest = max(stage.sides), max(stage.lengths)
        for visual in self._video.evaluation.lengths:
            grid = Grid(max(2, visual // side**2), side)
            if grid.tokens <= longest:
                for task in TASKS:
                    marks = [
                        self._mark(task, grid, number)
                        for number in range(self._video.evaluation.samples)
                    ]
                    right = sum(hits for hits, _ in marks) / sum(count for _, count in marks)
                    exact = sum(hits == count for hits, count in marks) / len(marks)
                    yield task, visual, exact, right

    def _mark(self, task: str, grid: Grid, number: int) -> tuple[int, int]:
        """Right tokens, and tokens, of one answer."""
        prompt = draw_prompt(task, grid, self._video.cast, GLANCE_SEED, number)
        answer, ids = prompt.answer, [*prompt.ids, *prompt.answer]
        tokens = torch.tensor([ids], device=self._device)
        times = torch.from_numpy(video_positions(len(ids), grid))[None].to(self._device)
        codes = torch.from_numpy(prompt.codes.astype("int64")).to(self._device)
        with torch.no_grad(), attention_backend(self._glance_attention):
            hidden = self._seen(tokens, times, codes, grid, Pieces.plain(), keep=False)
            end = len(ids) - 1
            places = torch.arange(end - len(answer), end, device=self._device)
            guessed = guess_logits(self.model, hidden, places).argmax(-1).tolist()
        return sum(a == b for a, b in zip(guessed, answer, strict=True)), len(answer)

    def _built(self) -> Any:
        settings = self._video
        return build(settings.model, settings.vision, self._vocabulary, settings.seed)

    def _hidden(self, batch: OnDevice, pieces: Pieces) -> Tensor:
        return self._seen(
            batch.tokens, batch.positions, batch.codes, Grid(*batch.grid), pieces, keep=True
        )

    def _seen(
        self, tokens: Tensor, times: Tensor, codes: Tensor, grid: Grid, pieces: Pieces, *,
        keep: bool,
    ) -> Tensor:  # fmt: skip
        key = grid, tokens.shape[1]
        places = self._places.get(key)
        if places is None:
            places = Places(self.model, *key, self._device)
            if keep:
                self._places[key] = places
        return video_hidden(
            self.model, tokens, times, self._patches(codes, grid), grid, places, pieces,
            self._dtype,
        )  # fmt: skip

    def _patches(self, codes: Tensor, grid: Grid) -> Tensor:
        """[frames of all rows, patches, components]"""
        found = self._table.index_select(0, codes.reshape(-1))
        return found.view(-1, grid.side**2 * found.shape[1], found.shape[2])

    def _difference(self) -> float:
        grid = Grid(5, 3)
        draw = torch.Generator().manual_seed(0)
        length = grid.tokens + 9
        rows = []
        for number in range(2):
            rng = random.Random(f"difference/{number}")
            clip = draw_clip(*grid, self._video.cast, rng)
            rows.append([BOS, *clip_ids(clip, self._vocabulary)])
        tokens = torch.randint(4 + 4, len(self._vocabulary), (2, length), generator=draw)
        tokens[:, : grid.tokens] = torch.tensor(rows)
        codes = torch.randint(0, len(self._table), (2 * grid.visual_tokens,), generator=draw)
        times = torch.from_numpy(video_positions(length, grid)).expand(2, -1)
        tokens, times, codes = (part.to(self._device) for part in (tokens, times, codes))
        return difference(
            self.model, tokens, times, self._patches(codes, grid), grid, Pieces.plain(),
            self._dtype,
        )  # fmt: skip
