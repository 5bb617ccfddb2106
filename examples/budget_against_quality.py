"""How much memory do right answers take? Puzzles are answered at several budgets.

A path leads through rules in random order, and the model writes it down to its end: every hop has
to find one rule among many. The table shows the share of hops before the first mistake, and the
memory that the KV cache took. Below its smallest budget a policy refuses to run.

    python budget_against_quality.py
    python budget_against_quality.py --model ./my-model --policies kvswap,quest,streaming_llm
"""

import argparse
import random
from itertools import pairwise, product, takewhile

from penstock import LLM, BudgetError, SamplingParams

ADJECTIVES = "vivid stale quick sharp brave open quiet round bright deep pale swift"
NOUNS = "door tower potato wheel car garden river lamp bell coat island needle"
HOPS = 6


def make_puzzle(rng: random.Random) -> tuple[str, list[str]]:
    """A prompt with 144 rules, and the hops of its only right answer: the last of one long path."""
    nodes = [
        f"{adjective} {noun}" for adjective, noun in product(ADJECTIVES.split(), NOUNS.split())
    ]
    path = [*rng.sample(nodes, len(nodes)), "stop"]
    rules = [f"{a} > {b} ;" for a, b in pairwise(path)]
    start, *hops = path[-HOPS - 1 :]
    preface = "Memorize the path rules below . Follow the path later ."
    question = f"Question : Start at {start} and follow the path until stop . Answer : {start}"
    return " ".join([preface, *rng.sample(rules, len(rules)), question]), hops


def share_of_hops(text: str, hops: list[str]) -> float:
    """Hops before the first mistake, of all."""
    said = [hop.strip(" .") for hop in text.split(">")[1:]]
    right = takewhile(lambda pair: pair[0] == pair[1], zip(said, hops, strict=False))
    return len(list(right)) / len(hops)


def main() -> None:
    """Print a line for each budget and policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="recall", help="the bundled model, or a model's folder")
    parser.add_argument("--policies", default="kvswap,quest", help="names, see penstock.POLICIES")
    parser.add_argument("--budgets", default="1/1,1/4,1/6", help="shares of the full KV cache")
    parser.add_argument("--puzzles", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    rng = random.Random(arguments.seed)
    prompts, paths = zip(*(make_puzzle(rng) for _ in range(arguments.puzzles)), strict=True)
    params = SamplingParams(temperature=0, max_tokens=3 * HOPS + 2)
    loaded = LLM(arguments.model)
    print(
        f"{len(prompts)} puzzles of {HOPS} hops. Memory: the KV cache, with its tables and buffers."
    )
    print("policy          budget             memory  hops right")
    for policy in arguments.policies.split(","):
        for budget in arguments.budgets.split(","):
            llm = LLM(loaded.model, tokenizer=loaded.tokenizer, policy=policy, memory=budget)
            try:
                answers = llm.generate(list(prompts), params)
            except BudgetError as error:
                print(f"{policy:15} {budget:>6}   refused: {error}")
                continue
            shares = [share_of_hops(a.text, path) for a, path in zip(answers, paths, strict=True)]
            memory = answers[0].memory
            held, full = memory.peak_bytes / 2**20, memory.full_cache_bytes / 2**20
            right = sum(shares) / len(shares)
            print(f"{policy:15} {budget:>6} {held:6.1f} of {full:.1f} MiB {right:11.0%}")


if __name__ == "__main__":
    main()
