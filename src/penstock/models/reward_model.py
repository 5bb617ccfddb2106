"""RewardModelScorer: a sequence classifier of transformers that rates the texts of a search."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as hf_logging

from penstock.core.errors import ConfigError, ModelLoadError, VerifierError
from penstock.models.load_errors import said_of
from penstock.models.loader import find_device
from penstock.models.model_config import read_config

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class _Rated(Protocol):
    """What is rated: the text behind a prompt."""

    @property
    def prompt(self) -> str: ...

    @property
    def text(self) -> str: ...


class RewardModelScorer:
    """A reward model from a folder, with its own tokenizer; never touches the network.

    It reads the prompt and the text behind it as one text. With one label the score is its
    logit; with two it is the second's lead over the first (the log-odds of "right").

    Args:
        folder: written by `save_pretrained` of a sequence classifier and of its tokenizer.
        batch_size: texts per forward pass; one at a time when there is no padding token.
        device: "cpu" or "cuda".

    Raises:
        ModelLoadError: the folder is missing or incomplete, holds no sequence classifier, or one
            that needs code of its own.
        ConfigError: the classifier has more labels than two, or there is no such device.
    """

    needs_text = True

    def __init__(
        self, folder: str | Path, *, batch_size: int = 16, device: torch.device | str = "cpu"
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1")
        self.name = f"reward:{folder}"
        self._device = find_device(device)
        self._tokenizer, self._model = _load(Path(os.path.expanduser(folder)), self.name)
        self._labels = int(self._model.config.num_labels)
        if self._labels not in (1, 2):
            raise ConfigError(
                f"{self.name} sorts texts into {self._labels} classes; a reward model has one "
                "label, or two for wrong and right"
            )
        self._batch_size = self._padded_batch(batch_size)
        # A tokenizer without a limit has a huge one; some models have fewer places than positions.
        positions = getattr(self._model.config, "max_position_embeddings", None) or 1 << 30
        self._max_tokens = int(min(positions, self._tokenizer.model_max_length))
        self._model.to(self._device).eval()

    def score(self, candidates: Sequence[_Rated]) -> list[float]:
        """One number per candidate, in their order; see `StepScorer`.

        Raises:
            VerifierError: a text is longer than the reward model's positions.
        """
        texts = [one.prompt + one.text for one in candidates]
        token_ids = [list(self._tokenizer(text, verbose=False)["input_ids"]) for text in texts]
        longest = max(map(len, token_ids), default=0)
        if longest > self._max_tokens:
            raise VerifierError(
                f"scorer {self.name} cannot read a text of {longest:,} tokens: it has "
                f"{self._max_tokens:,} positions"
            )
        # Texts of like lengths share a batch, so that little of it is padding.
        order = sorted(range(len(texts)), key=lambda at: len(token_ids[at]))
        scores = [0.0] * len(texts)
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            for at, score in zip(batch, self._rate([token_ids[i] for i in batch]), strict=True):
                scores[at] = score
        return scores

    def _rate(self, rows: list[list[int]]) -> list[float]:
        longest = max(map(len, rows))
        padding = self._model.config.pad_token_id or 0
        inputs = torch.full((len(rows), longest), padding, dtype=torch.int64)
        mask = torch.zeros_like(inputs)
        for row, ids in enumerate(rows):
            inputs[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            mask[row, : len(ids)] = 1
        with torch.no_grad():
            logits = self._model(
                input_ids=inputs.to(self._device), attention_mask=mask.to(self._device)
            ).logits.float()
        scores = logits[:, 0] if self._labels == 1 else logits[:, 1] - logits[:, 0]
        return [float(score) for score in scores.tolist()]

    def _padded_batch(self, wanted: int) -> int:
        """The batch size that the padding allows; decoders look for the last unpadded token."""
        config = self._model.config
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = self._tokenizer.pad_token_id
        return 1 if config.pad_token_id is None else wanted


def _load(folder: Path, name: str) -> tuple[Any, Any]:
    if not os.path.isfile(folder / "config.json"):
        raise ModelLoadError(
            f"{name}: there is no config.json in {folder}; give the folder of a reward model"
        )
    config = read_config(folder, name)
    had_bars = hf_logging.is_progress_bar_enabled()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **_LOCAL)
        hf_logging.disable_progress_bar()
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, config=config, dtype="auto", output_loading_info=True, **_LOCAL
        )
    except Exception as error:
        raise ModelLoadError(f"{name}: {said_of(error)}") from error
    finally:
        if had_bars:
            hf_logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{name} is no trained reward model: {len(missing)} of its tensors are not in the "
            f"folder ({missing[0]})"
        )
    return tokenizer, model
