"""A policy of one's own: three methods say what is kept of the past's keys, and what matters now.

`MeanKey` keeps the mean of every eight keys, and reads the units whose mean has the largest product
with the query. The engine does the rest: sizing, disk, prefetch, attention. The model then follows
a path through rules in random order, and each hop is somewhere else in the text.

    python custom_policy.py
    python custom_policy.py --model ./my-model --memory 1/4
"""

import argparse
import random
from dataclasses import dataclass
from itertools import pairwise, product
from typing import ClassVar

from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.core.shape import KVShape
from penstock.engine.scored_policy import ScoredPolicy

ADJECTIVES = "vivid stale quick sharp brave open quiet round bright deep pale swift"
NOUNS = "door tower potato wheel car garden river lamp bell coat island needle"
HOPS = 8


@dataclass(frozen=True, kw_only=True)
class MeanKey(ScoredPolicy):
    """Units ranked by the product of their mean key and the query."""

    name: ClassVar[str] = "mean_key"
    group_tokens: int = 8

    def summary_bytes(self, shape: KVShape) -> int:
        """One key, of all KV heads."""
        return shape.joint_dim * shape.dtype.itemsize

    def summarise(self, keys: Tensor) -> tuple[Tensor]:
        """[rows, kv_heads, units, group_tokens, head_dim] -> [rows, kv_heads, units, head_dim]"""
        return (keys.mean(dim=3),)

    def score(self, summary: tuple[Tensor, ...], query: Tensor) -> Tensor:
        """Query: [rows, kv_heads, head_dim, heads] -> [rows, kv_heads, units, heads]"""
        return summary[0] @ query


def make_puzzle(rng: random.Random) -> tuple[str, str]:
    """A prompt with 144 rules, and its only right answer: the last hops of one long path."""
    nodes = [
        f"{adjective} {noun}" for adjective, noun in product(ADJECTIVES.split(), NOUNS.split())
    ]
    path = [*rng.sample(nodes, len(nodes)), "stop"]
    rules = [f"{a} > {b} ;" for a, b in pairwise(path)]
    start, *hops = path[-HOPS - 1 :]
    preface = "Memorize the path rules below . Follow the path later ."
    question = f"Question : Start at {start} and follow the path until stop . Answer : {start}"
    prompt = " ".join([preface, *rng.sample(rules, len(rules)), question])
    return prompt, "".join(f"> {hop} " for hop in hops) + "."


def main() -> None:
    """Answer with the whole KV cache in memory, then under the policy above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="recall", help="the bundled model, or a model's folder")
    parser.add_argument("--memory", default="1/3", help="share of the full KV cache, or bytes")
    arguments = parser.parse_args()

    prompt, right = make_puzzle(random.Random(0))
    params = SamplingParams(temperature=0, max_tokens=3 * HOPS + 2)
    full = LLM(arguments.model, policy="full", memory="1/1")
    own = LLM(full.model, tokenizer=full.tokenizer, policy=MeanKey(), memory=arguments.memory)
    for llm in (full, own):
        [answer] = llm.generate(prompt, params)
        text = answer.text.strip()
        print(
            f"{answer.run.policy:9} {answer.memory.peak_bytes / 2**20:5.2f} MiB  "
            f"{'right' if text == right else 'wrong'}: {text}"
        )


if __name__ == "__main__":
    main()
