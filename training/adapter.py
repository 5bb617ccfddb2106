"""Fit the low-rank adapter of a trained model: `python -m training.adapter FOLDER`.

Reads fresh samples of every task, answers included, and writes `adapter.safetensors` beside the
weights. One task alone would not do: research/notes/2026-11-20-index-on-recall-7m.md has the cost.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate.progress import Progress
from penstock.evaluate.tasks import Words
from penstock.models.calibrate import calibrate
from penstock.models.loader import load
from training.checkpoint import write_sums
from training.data import BOS, EOS, GENERATORS
from training.examine import draw_sample

SEED = 123_456_789
"""Of the samples that are read; no evaluation takes it."""
_SAY_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit the adapter of one folder."""
    parser = argparse.ArgumentParser(prog="python -m training.adapter", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--samples", type=int, default=2, help="of each task")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args(arguments)
    try:
        loaded = load(args.model, device=args.device)
        if loaded.tokenizer is None:
            raise ConfigError(f"{args.model} has no tokenizer")
        vocabulary = loaded.tokenizer.get_vocab()
        words, texts = Words.of(vocabulary), []
        for task in GENERATORS:
            for number in range(args.samples):
                sample = draw_sample(task, number, tokens=args.tokens, seed=SEED, words=words)
                said = f"{sample.prompt} {sample.answer}".split()
                texts.append(torch.tensor([BOS, *(vocabulary[word] for word in said), EOS]))
        longest = max(map(len, texts))  # each text whole, so that positions are as when asked
        path = args.model / "adapter.safetensors"
        calibrate(loaded.model, texts, window_tokens=longest, path=path, progress=_reporter(texts))
        write_sums(args.model)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _reporter(texts: Sequence[torch.Tensor]) -> Callable[[int, int], None]:
    """Takes tokens done and tokens in all, and prints a line every few seconds."""
    progress = Progress(2 * sum(map(len, texts)))
    done, said = 0, time.perf_counter()

    def report(tokens: int, of: int) -> None:
        nonlocal done, said
        progress.step(tokens - done)
        done = tokens
        if time.perf_counter() - said > _SAY_S:
            progress.say(f"{tokens:,} of {of:,} tokens")
            said = time.perf_counter()

    return report


if __name__ == "__main__":
    sys.exit(main())
