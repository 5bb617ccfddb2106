"""Sample at a temperature that breaks a long answer, and let a verifier keep what is right.

A path leads through rules in random order ("pale door > quick tower ;"); the model has to write it
down to its end. One sample goes wrong at some hop. The search samples a few hops at a time, and
keeps the candidates that the verifier finds no mistake in.

    python search_with_verifier.py
    python search_with_verifier.py --model ./my-model --beams 16
"""

import argparse
import random
from itertools import pairwise, product

from penstock import LLM, BeamSearcher, SamplingParams, SearchMemory, SearchParams

ADJECTIVES = "vivid stale quick sharp brave open quiet round bright deep pale swift"
NOUNS = "door tower potato wheel car garden river lamp bell coat island needle"
HOPS = 16


def make_puzzle(rng: random.Random) -> tuple[str, str]:
    """A prompt, and its only right answer: the last hops of one long path."""
    nodes = [
        f"{adjective} {noun}" for adjective, noun in product(ADJECTIVES.split(), NOUNS.split())
    ]
    path = [*rng.sample(nodes, 64), "stop"]
    rules = [f"{a} > {b} ;" for a, b in pairwise(path)]
    start, *hops = path[-HOPS - 1 :]
    preface = "Memorize the path rules below . Follow the path later ."
    question = f"Question : Start at {start} and follow the path until stop . Answer : {start}"
    prompt = " ".join([preface, *rng.sample(rules, len(rules)), question])
    return prompt, "".join(f"> {hop} " for hop in hops) + "."


def verify(prompt: str, texts: list[str]) -> list[float]:
    """Hops of each text, all right so far; less than zero where one breaks the rules."""
    rules, _, question = prompt.partition(" Question : ")
    leads_to = dict(rule.split(" > ") for rule in rules.split(" later . ")[1][:-2].split(" ; "))
    start = question.rpartition(" Answer : ")[2]
    scores = []
    for text in texts:
        path = [start, *(node.strip(" .") for node in text.split(">")[1:])]
        hops = list(pairwise(path))
        # The last hop may be cut in the middle.
        good = [leads_to.get(a, "").startswith(b) for a, b in hops]
        scores.append(float(len(hops)) if all(good) else good.index(False) - 1000.0)
    return scores


def main() -> None:
    """Answer by one sample, then by a search."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="recall", help="the bundled model, or a model's folder")
    parser.add_argument("--beams", type=int, default=8, help="candidates of a step")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    prompt, right = make_puzzle(random.Random(arguments.seed))
    sampling = {"temperature": arguments.temperature, "seed": arguments.seed}
    params = SamplingParams(max_tokens=4 * HOPS, **sampling)
    llm = LLM(arguments.model)
    [sample] = llm.generate(prompt, params)
    searcher = BeamSearcher(
        llm.model, tokenizer=llm.tokenizer, scorer=verify, memory=SearchMemory(memory="1/4")
    )
    search = SearchParams(
        beams=arguments.beams, width=2, step_tokens=6, max_new_tokens=4 * HOPS, **sampling
    )
    found = searcher.search(prompt, search).best
    assert found is not None  # only where a search is interrupted
    for name, text in (("one sample", sample.text), ("search", found.text)):
        print(f"{name}: {'right' if text.strip() == right else 'wrong'}\n  {text.strip()}")


if __name__ == "__main__":
    main()
