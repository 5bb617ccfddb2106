"""Fit the low-rank adapter that ships with the bundled model, on samples of its own tasks.

The calibration samples come from seeds that no benchmark uses. One kind of document is not enough
(research/notes/2026-11-20-index-on-recall-7m.md): seven kinds at 16K tokens and three at 32K are
read.

    python benchmarks/fit_recall_adapter.py [--device cuda] [--out adapter.safetensors]
"""

import argparse
import random
from pathlib import Path

import torch

import penstock
from penstock.evaluate.tasks.recall import make_sample
from penstock.models.calibrate import calibrate
from penstock.models.loader import load

SEED = 990_001
SHORT = (
    "single_essay", "multi_key_full", "multi_value", "multi_query", "variable_tracking",
    "pointer_chasing", "copy",
)  # fmt: skip
LONG = ("single_essay", "multi_key_full", "pointer_chasing")
RANK = 72
DEFAULT_OUT = Path(penstock.__file__).parent / "models" / "recall" / "adapter.safetensors"


def main() -> None:
    """Read the arguments, fit, save, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="recall", help="of the same vocabulary")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--short", type=int, default=16_384, help="tokens of the short samples")
    parser.add_argument("--long", type=int, default=32_768, help="tokens of the long samples")
    arguments = parser.parse_args()
    loaded = load(arguments.model, device=arguments.device)
    rng = random.Random(SEED)
    texts = []
    for tokens, tasks in ((arguments.short, SHORT), (arguments.long, LONG)):
        for task in tasks:
            sample = make_sample(task, tokens, rng, loaded.tokenizer)
            ids = loaded.tokenizer(sample.prompt + " " + sample.answer)["input_ids"]
            texts.append(torch.tensor(ids))
    adapter = calibrate(
        loaded.model, texts, rank=RANK, window_tokens=arguments.long + 2048, path=arguments.out,
        progress=lambda done, total: print(f"{done:,} of {total:,} tokens", flush=True),
    )  # fmt: skip
    cosines = " ".join(f"{cosine:.2f}" for cosine in adapter.prediction_cosine)
    print(f"{arguments.out}: rank {adapter.rank}, {adapter.tokens:,} tokens; cosines {cosines}")
    layers = adapter.shared_layers()
    for mean in (16, 24, 32, 48):
        print(f"rank {mean}: {' '.join(str(layer.rank_at(mean)) for layer in layers)}")


if __name__ == "__main__":
    main()
