"""`penstock demo`: ask the bundled model about a long document in a fraction of the memory."""

import random
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.generate import DeviceOption, DiskOption, MemoryOption, PolicyOption

_ANSWER_MARK = " Answer : "
_QUESTION_MARK = "Question : "


def demo_command(
    tokens: Annotated[int, typer.Option(help="Length of the document, in tokens.")] = 16384,
    memory: MemoryOption = "1/34",
    policy: PolicyOption = "kvswap",
    disk: DiskOption = "auto",
    device: DeviceOption = "cpu",
    seed: Annotated[int, typer.Option(help="Another seed, another document.")] = 0,
) -> None:
    """Ask the bundled model about a long document.

    Facts are hidden in a made-up document, and one of them is asked for. Exits with 1 when the
    answer is wrong.
    """
    from penstock.bench.tasks.recall import make_sample
    from penstock.bench.tasks.sample import score
    from penstock.cli.screen import AnswerScreen, show_report
    from penstock.generation.engine import LLM
    from penstock.generation.sampling import SamplingParams

    console = Console(highlight=False)
    llm = LLM("recall", policy=policy, memory=memory, store=disk, device=device)
    assert llm.tokenizer is not None
    sample = make_sample("multi_key_few", tokens, random.Random(seed), llm.tokenizer.get_vocab())
    document, question, lead = _split(sample.prompt)
    fact = f"{lead} {sample.answer}"
    place = len(document[: document.index(fact)].split())
    of_what = " of the full cache" if set("/%") & set(memory) else ""
    console.print(
        Text.assemble(
            ("Penstock demo\n", "bold"),
            f"A document of {tokens:,} tokens, made up from seed {seed}; facts such as\n  ",
            (fact, "italic"),
            f"\nare hidden in it (this one {place:,} tokens from its start).\n"
            f"Memory for its KV cache: {memory}{of_what}.\n",
        ),
        soft_wrap=True,
    )
    params = SamplingParams(temperature=0, max_tokens=sample.max_new_tokens)
    heading = f"{_QUESTION_MARK}{question}\n{_ANSWER_MARK.strip()} {lead} "
    with AnswerScreen(console, sys.stdout, heading) as screen:
        [output] = llm.generate(
            sample.prompt, params, on_text=screen.on_text, on_progress=screen.on_progress
        )
    correct = bool(score(sample, output.text))
    if correct:
        console.print(Text("Correct: that is what the document says.\n", "bold green"))
    else:
        console.print(Text(f"Wrong: the document says {sample.answer}\n", "bold red"))
    show_report(console, output.run)
    if not correct:
        raise typer.Exit(1)


def _split(prompt: str) -> tuple[str, str, str]:
    """A sample's prompt as its document, the question, and the beginning of the answer."""
    document, _, rest = prompt.rpartition(_QUESTION_MARK)
    question, _, lead = rest.partition(_ANSWER_MARK)
    return document, question, lead
