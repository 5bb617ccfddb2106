"""Sharper attention for a finished model: `python -m training.sharpen MODEL --by 1.1 --out OTHER`.

A softmax over n keys spreads the more, the more there are: what is right at 4K tokens, where most
rows of training are, is a little too even at 32K, where a key among 40,000 that is hardly like the
query's has some weight too. All logits times a constant is what YaRN does for longer contexts
(Peng et al., arXiv 2309.00071, section 3.4, there (0.1 ln(s) + 1)^2 for contexts s times longer);
in a Qwen3 the weight of its norm of queries is that. What it did for recall-2:
research/notes/2026-11-25-long-walks.md. `sharpen` in a run's settings does
the same at the end of a sitting.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import ConfigError, PenstockError


def sharpen(folder: Path, out: Path, by: float) -> None:
    """Write a model whose attention has `by` times the logits of another one's.

    Args:
        folder: a Qwen3 as `training.train` leaves it.
        out: to write; what is there is replaced.
        by: above 0; below 1 is more even.

    Raises:
        ConfigError: it is no such model, `by` is impossible, or both folders are the same.
        ModelLoadError: the folder is incomplete or unreadable.
        StorageError: it cannot be written.
    """
    from transformers import Qwen3ForCausalLM

    from penstock.models.loader import load
    from training.checkpoint import export

    if not 0 < by < math.inf:
        raise ConfigError(f"--by {by:g} must be above 0")
    if out.resolve() == folder.resolve():
        raise ConfigError(f"--out {out} is the model itself; give another folder")
    model = load(folder, dtype="float32").model
    if not isinstance(model, Qwen3ForCausalLM):
        raise ConfigError(f"{folder} is no Qwen3: it has no norm of queries to be sharpened by")
    export(model, out, folder, sharpen=by)


def main(arguments: Sequence[str] | None = None) -> int:
    """Sharpen one model."""
    parser = argparse.ArgumentParser(prog="python -m training.sharpen", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a model, a run's model/")
    parser.add_argument("--by", type=float, required=True, help="times the logits of attention")
    parser.add_argument("--out", type=Path, required=True, help="folder for the other model")
    args = parser.parse_args(arguments)
    try:
        sharpen(args.model, args.out, args.by)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
