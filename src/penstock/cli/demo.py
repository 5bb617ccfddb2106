"""`penstock demo`: ask the bundled model about a long document in a fraction of the memory."""

import random
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from penstock.cli.console import PlainConsole
from penstock.cli.options import DeviceOption, DiskOption, MemoryOption, PolicyOption
from penstock.cli.process_sizes import ProcessSizes

if TYPE_CHECKING:
    from penstock.evaluate.tasks.sample import Sample


def demo_command(
    tokens: Annotated[int, typer.Option(help="Length of the document, in tokens.")] = 16384,
    memory: MemoryOption = "1/34",
    policy: PolicyOption = "kvswap",
    disk: DiskOption = "auto",
    device: DeviceOption = "cpu",
    seed: Annotated[int, typer.Option(help="Another seed, another document.")] = 0,
) -> None:
    """Ask the bundled model about a long document.

    Facts are hidden in a made-up document, and all of them are asked for in one question. Exits
    with 1 when the answer is wrong.
    """
    from penstock.cli.loading import loading
    from penstock.cli.screen import AnswerScreen, show_report
    from penstock.evaluate.tasks.recall import make_sample
    from penstock.evaluate.tasks.sample import score
    from penstock.generation.engine import LLM
    from penstock.generation.sampling import SamplingParams

    console = PlainConsole()
    with loading(console, "recall"):
        llm = LLM("recall", policy=policy, memory=memory, store=disk, device=device)
    assert llm.tokenizer is not None
    sample = make_sample("multi_query", tokens, random.Random(seed), llm.tokenizer.get_vocab())
    document, _, question = sample.prompt.rpartition("Question : ")
    share = " of the full cache" if set("/%") & set(memory) else ""
    console.print(Text("Penstock demo", "bold"))
    console.print(f"A document of {tokens:,} tokens, made up from seed {seed}. Hidden in it:")
    for place, fact in _hidden_facts(sample, document):
        console.print(Text.assemble(f"  at token {place:>6,}  ", (fact, "italic")), soft_wrap=True)
    console.print(f"Memory for its KV cache: {memory}{share}.\n")
    params = SamplingParams(temperature=0, max_tokens=sample.max_new_tokens)
    lead = f"Question : {question.replace(' Answer :', chr(10) + 'Answer :')} "
    with AnswerScreen(console, sys.stdout, lead) as screen:
        [output] = llm.generate(
            sample.prompt, params, on_text=screen.on_text, on_progress=screen.on_progress,
            on_index=screen.on_index,
        )  # fmt: skip
    correct = bool(score(sample, output.text))
    if correct:
        console.print(Text("Correct: that is what the document says.\n", "bold green"))
    else:
        console.print(Text(f"Wrong: the document says {sample.answer}\n", "bold red"))
    show_report(console, output.run, ProcessSizes.of(llm.model))
    if not correct:
        raise typer.Exit(1)


def _hidden_facts(sample: "Sample", document: str) -> list[tuple[int, str]]:
    """Each fact that is asked for, and the tokens in front of it, in the document's order."""
    facts = []
    for value in sample.values:
        end = document.index(f" for {value} .")
        start = document.rindex("The ", 0, end)
        fact = document[start : document.index(".", end) + 1]
        facts.append((len(document[:start].split()), fact))
    return sorted(facts)
