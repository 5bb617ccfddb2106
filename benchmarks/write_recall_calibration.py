"""Write the texts that the bundled model is tuned on: documents, questions, and true answers.

The samples come from a seed that no benchmark uses. Every text ends in an answer, of which the
first 64 tokens are kept, so that what decoding is judged on needs tokens from all over the
document; tasks with long answers and those that name several needles take turns.

    python benchmarks/write_recall_calibration.py [--out calibration.txt.xz]
"""

import argparse
import lzma
import random
from pathlib import Path

import penstock
from penstock.evaluate.tasks.recall import make_sample
from penstock.models.loader import load

SEED = 990_002
ANSWER_TOKENS = 64
TASKS = ("multi_query", "pointer_chasing", "two_walkers", "copy")
FEWEST_ANSWER_TOKENS = 32
"""Answers that are digits have so many; those that are words are drawn again."""
SIZES = ((1024, 4), (2048, 4), (4096, 4), (8192, 4), (16_384, 2), (32_768, 2))
"""Tokens of a text at most, and texts of that size."""
DEFAULT_OUT = Path(penstock.__file__).parent / "models" / "recall" / "calibration.txt.xz"


def text(task: str, tokens: int, rng: random.Random, vocabulary: dict[str, int]) -> str:
    """A document of about `tokens` tokens, its question, and the beginning of the answer."""
    while True:
        sample = make_sample(task, tokens - ANSWER_TOKENS, rng, vocabulary)
        answer = sample.answer.split()[:ANSWER_TOKENS]
        if len(answer) >= FEWEST_ANSWER_TOKENS:
            return " ".join([sample.prompt, *answer])


def main() -> None:
    """Read the arguments, make the texts, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    arguments = parser.parse_args()
    tokenizer = load("recall").tokenizer
    assert tokenizer is not None
    rng = random.Random(SEED)
    texts = []
    for tokens, count in SIZES:
        for task in TASKS[:count]:
            texts.append(text(task, tokens, rng, tokenizer.get_vocab()))
            found = len(tokenizer(texts[-1])["input_ids"])
            assert found <= tokens, (task, tokens, found)
            print(f"{found:6} tokens  {task}", flush=True)
    data = lzma.compress("\n\n".join(texts).encode(), preset=9 | lzma.PRESET_EXTREME)
    arguments.out.write_bytes(data)
    print(f"{arguments.out}: {len(data)} bytes")


if __name__ == "__main__":
    main()
