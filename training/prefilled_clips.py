"""Clips that the plain model has read once, and answers about them through caches of Penstock."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3VLForConditionalGeneration

from penstock.core.errors import ConfigError
from penstock.core.ledger import MemoryReport
from penstock.evaluate.accuracy_settings import Setting
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import tokens_of
from penstock.models.row_positions import blocks_of
from penstock.workloads.prefilled import EXACT_TAIL
from training.clips import Cast
from training.video_data import Grid, video_positions
from training.video_model import Places, embedded, on_axes, patch_table, seen
from training.video_questions import Prompt
from training.video_words import vocabulary


class Reader:
    """A video reader, and the pixels of its world.

    Args:
        model: the reader.
        cast: of the clips.
    """

    def __init__(self, model: Qwen3VLForConditionalGeneration, cast: Cast) -> None:
        self.model = model
        self._table = patch_table(cast, model.device)

    @torch.no_grad()
    def read(self, prompts: Sequence[Prompt], grid: Grid) -> "PrefilledClips":
        """Read prompts of one length but for their ends, with full attention.

        Args:
            prompts: of one task.
            grid: of their clips.
        """
        device, dtype = self.model.device, self.model.dtype
        tokens = torch.tensor([prompt.ids for prompt in prompts], device=device)
        length = tokens.shape[1]
        codes = np.stack([prompt.codes for prompt in prompts]).astype(np.int64)
        patches = self._table[torch.from_numpy(codes).to(device)]
        patches = patches.flatten(0, 1).flatten(1, 2)
        places = Places(self.model, grid, length, device)
        visual = seen(self.model, patches, places, dtype)
        embeds = embedded(self.model, tokens, visual, grid, dtype)
        times = torch.from_numpy(video_positions(length, grid)).to(device)
        return PrefilledClips(self.model, embeds, on_axes(times.expand(len(prompts), -1), grid))


def load_reader(folder: str | Path, cast: Cast, *, device: str, dtype: str) -> Reader:
    """Load a run's model.

    Raises:
        ConfigError: there is none, or it has another vocabulary.
    """
    try:
        model = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no video reader: {error}") from error
    if model.config.text_config.vocab_size != len(vocabulary()):
        raise ConfigError(f"{folder} has another vocabulary")
    return Reader(model.to(device).eval(), cast)


class PrefilledClips:
    """Prompts of a batch, all but `EXACT_TAIL` tokens of each read by the plain model.

    Args:
        model: the reader.
        embeds: of the prompts. [rows, tokens, hidden]
        positions: int64 [3, rows, tokens]
    """

    def __init__(
        self, model: Qwen3VLForConditionalGeneration, embeds: Tensor, positions: Tensor
    ) -> None:
        self._model: Any = model
        self._tail = embeds[:, -EXACT_TAIL:], positions[:, :, -EXACT_TAIL:]
        self._shape = inspect_model(model)
        self._cache: Any = DynamicCache(config=model.config)
        self._call(self._cache, embeds[:, :-EXACT_TAIL], positions[:, :, :-EXACT_TAIL])
        self._tokens = embeds.shape[1]
        # Clips of a batch are alike in size: so are the rows' positions.
        self._blocks = blocks_of(positions[:, 0, :-EXACT_TAIL].cpu(), start=0, text=0)

    def answered(
        self, prompts: Sequence[Prompt], setting: Setting, store: str
    ) -> tuple[list[list[int]], MemoryReport]:
        """What a setting guesses at each token of the right answers, and the memory it took.

        Args:
            prompts: those that were read.
            setting: policy and budget.
            store: see `TieredCache`.

        Raises:
            BudgetError: the budget is too small.
        """
        longest = max(len(prompt.answer) for prompt in prompts)
        with TieredCache(
            self._model, setting.policy, memory=setting.memory, store=store,
            max_tokens=self._tokens + longest, batch_size=len(prompts),
        ) as cache:  # fmt: skip
            for tier, layer in enumerate(self._shape.tiered_layers):
                cache.tiers.append(tier, *tokens_of(self._cache, layer, self._shape.kv), None)
            assert cache.decoder_calls is not None
            cache.decoder_calls.positions.hold([self._blocks] * len(prompts))
            guesses = [self._call(cache, *self._tail)]
            position = self._tail[1][:, :, -1:]
            embedding = self._model.get_input_embeddings()
            for at in range(longest - 1):
                given = [prompt.answer[min(at, len(prompt.answer) - 1)] for prompt in prompts]
                step = embedding(torch.tensor(given, device=position.device)[:, None])
                guesses.append(self._call(cache, step, position + 1 + at))
            report = cache.report()
        said = torch.stack(guesses, dim=1).tolist()
        return [row[: len(p.answer)] for row, p in zip(said, prompts, strict=True)], report

    @torch.no_grad()
    def _call(self, cache: Any, embeds: Tensor, positions: Tensor) -> Tensor:
        """Read tokens into a cache; the likeliest next token of each row. int64 [rows]"""
        out = self._model(
            inputs_embeds=embeds, position_ids=positions, use_cache=True, logits_to_keep=1,
            **cache_argument(self._model, cache),
        )  # fmt: skip
        guessed: Tensor = out.logits[:, -1].argmax(-1)
        return guessed
