"""Measure the lookup tables that ship with the bundled model, on the texts that ship with it.

python benchmarks/measure_recall_tables.py [--tokens 8192] [--out tuning_tables.json]
"""

import argparse
from pathlib import Path

import penstock
from penstock.evaluate.progress import Progress
from penstock.models.loader import load
from penstock.tuner.build_tables import build_tables
from penstock.tuner.calibration_texts import calibration_tokens

DEFAULT_OUT = Path(penstock.__file__).parent / "models" / "recall" / "tuning_tables.json"


def main() -> None:
    """Read the arguments, measure, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the texts, at most")
    parser.add_argument("--forced", type=int, default=64, help="decoded at the end of each")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    arguments = parser.parse_args()
    loaded = load("recall")
    token_ids = calibration_tokens(loaded, [], tokens=arguments.tokens, forced=arguments.forced)
    texts = (
        f"{len(token_ids)} documents of the model's own kinds (calibration.txt.xz) of at most "
        f"{arguments.tokens} tokens, the last {arguments.forced} decoded"
    )
    progress: list[Progress] = []

    def tell(done: int, total: int, what: str) -> None:
        if done:
            progress[0].step(1)
        else:
            progress.append(Progress(total))
        progress[0].say(what)

    tables = build_tables(
        loaded, token_ids, forced=arguments.forced, texts=texts, progress=tell
    )  # fmt: skip
    tables.save(arguments.out)
    print(f"{arguments.out}: {len(tables.entries)} entries")


if __name__ == "__main__":
    main()
