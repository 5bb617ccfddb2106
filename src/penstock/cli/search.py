"""`penstock search`: answer a prompt by step-wise beam search in a memory budget."""

import importlib.util
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from penstock.cli.command import TorchCommand
from penstock.cli.console import PlainConsole, for_reader
from penstock.cli.loading import ModelSource, load_model
from penstock.cli.model_options import OfflineOption, RevisionOption, TrustOption
from penstock.cli.options import (
    DeviceOption,
    DtypeOption,
    IgnoreEndOption,
    JsonOption,
    MaxNewTokensOption,
    ModelArgument,
    PromptFileOption,
    PromptOption,
    SeedOption,
    StopOption,
    TopKOption,
    TopPOption,
    WeightsOption,
    memory_option,
    unescaped,
)
from penstock.cli.output_file import ForceOption, check_writable
from penstock.cli.process_sizes import ProcessSizes
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.search.beam_searcher import BeamSearcher
    from penstock.search.search_params import SearchParams
    from penstock.search.search_tree import SearchOutput
    from penstock.search.step_scorer import StepScorer

PLAN = "plan"


class Strategy(StrEnum):
    """What `--strategy` takes."""

    SCHEDULED = "scheduled"
    RESIDENT = "resident"
    LAYERWISE = "layerwise"


class SearchCommand(TorchCommand):
    """`penstock search`, and `penstock search plan` under the same name."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        """Hand over to the plan when the first argument says so."""
        if args[:1] == [PLAN]:
            plan = _plan_command()
            return plan.make_context(f"{info_name} {PLAN}", args[1:], *more, **extra)
        return super().make_context(info_name, args, *more, **extra)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The options of the search, and that there is a plan."""
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl([(PLAN, _plan_command().get_short_help_str(limit=200))])


def _plan_command() -> Any:
    """`penstock search plan` as a command."""
    from penstock.cli.search_plan import search_plan_command

    plans = typer.Typer(add_completion=False, rich_markup_mode=None)
    plans.command(PLAN, cls=TorchCommand)(search_plan_command)
    command: Any = typer.main.get_command(plans)
    command.path = f"search {PLAN}"
    return command


_Beams = Annotated[int, typer.Option(help="Candidates of a step.")]
_Width = Annotated[
    int, typer.Option(help="Continuations sampled for each survivor; 1 is best of --beams.")
]
_Step = Annotated[int, typer.Option(metavar="TOKENS", help="Longest step.")]
_Delimiter = Annotated[
    str | None, typer.Option(metavar="TEXT", help=r"Ends a step early, such as '\n\n'.")
]
_Temperature = Annotated[float, typer.Option(help="Above 0 unless there is one beam.")]
_Scorer = Annotated[
    str,
    typer.Option(
        metavar="logprob|MODULE:FUNCTION|FILE.py:FUNCTION|reward:FOLDER",
        help="What rates the candidates; a function gets (texts), or (prompt, texts).",
    ),
]
_Penalty = Annotated[
    float, typer.Option(help="Of logprob: its sum is divided by tokens to this power.")
]
_Memory = Annotated[
    str,
    memory_option(
        "SIZE|SHARE|auto",
        "Bounds the KV cache of all beams, not the weights: 2GiB, 1/4 of what all take, or auto.",
    ),
]
_Disk = Annotated[
    str,
    typer.Option(
        metavar="PATH|nvme|ufs|emmc|memory|auto",
        help="The slow tier of the KV cache: a folder, a simulated device, memory, or auto.",
    ),
]
_Strategy = Annotated[Strategy, typer.Option(help="How KV is moved.")]
_NoOverlap = Annotated[bool, typer.Option("--no-overlap", help="Do not group by shared blocks.")]
_NoBalance = Annotated[bool, typer.Option("--no-balance", help="Fill groups one by one.")]
_NoPrefetch = Annotated[bool, typer.Option("--no-prefetch", help="Load when a group's turn comes.")]
_NoShare = Annotated[bool, typer.Option("--no-share", help="A copy of shared blocks per beam.")]
_Block = Annotated[int, typer.Option(metavar="TOKENS", help="Tokens of a block.")]
_Tree = Annotated[
    Path | None, typer.Option("--tree", metavar="FILE", help="Draw the tree: PNG, SVG or PDF.")
]


def search_command(
    model: ModelArgument = "recall", prompt: PromptOption = None,
    prompt_file: PromptFileOption = None, beams: _Beams = 16, width: _Width = 2, step: _Step = 64,
    delimiter: _Delimiter = None, stop: StopOption = None,
    max_new_tokens: MaxNewTokensOption = 256, temperature: _Temperature = 1.0,
    top_k: TopKOption = 0, top_p: TopPOption = 1.0, seed: SeedOption = None,
    ignore_end: IgnoreEndOption = False, scorer: _Scorer = "logprob",
    length_penalty: _Penalty = 1.0, memory: _Memory = "auto", disk: _Disk = "auto",
    strategy: _Strategy = Strategy.SCHEDULED,
    no_overlap: _NoOverlap = False, no_balance: _NoBalance = False,
    no_prefetch: _NoPrefetch = False, no_share: _NoShare = False, block_tokens: _Block = 16,
    device: DeviceOption = "cpu", dtype: DtypeOption = None, weights: WeightsOption = None,
    revision: RevisionOption = None, offline: OfflineOption = False,
    trust_remote_code: TrustOption = False, tree: _Tree = None,
    as_json: JsonOption = False, force: ForceOption = False,
) -> None:  # fmt: skip
    """Answer a prompt by step-wise beam search.

    Continuations are sampled and rated, and the best go on.
    The best answer goes to stdout, the live view and the end table to stderr.
    """
    from penstock.cli.prompts import read_prompt
    from penstock.search.beam_searcher import BeamSearcher, SearchMemory
    from penstock.search.search_params import SearchParams

    console = PlainConsole(stderr=True)
    params = SearchParams(
        beams=beams, width=width, step_tokens=step,
        delimiter=None if delimiter is None else unescaped(delimiter),
        stop=tuple(map(unescaped, stop or ())), max_new_tokens=max_new_tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, ignore_end=ignore_end,
    )  # fmt: skip
    if tree is not None:
        _check_tree(tree, force=force)
    rates = _scorer(scorer, length_penalty, device)
    text = read_prompt(prompt, prompt_file)
    kept = SearchMemory(
        memory=memory, store=disk, strategy=strategy.value, overlap=not no_overlap,
        balance=not no_balance, prefetch=not no_prefetch, share=not no_share,
        block_tokens=block_tokens,
    )  # fmt: skip
    source = ModelSource(revision, offline, trust_remote_code)
    loaded = load_model(console, model, dtype=dtype, weights=weights, device=device, source=source)
    searcher = BeamSearcher(loaded, scorer=rates, memory=kept)
    quiet = as_json and not console.is_terminal
    output = _search(searcher, text, params, None if quiet else console, model, as_json)
    _tell(output, model, as_json)
    if not as_json:
        from penstock.cli.search_screen import show_search

        show_search(console, output, ProcessSizes.of(loaded.model))
    if tree is not None:  # when the answer has been told, whatever happens to the picture
        from penstock.evaluate.search_tree import write_search_tree

        write_search_tree(output, tree, model=model)


def _search(
    searcher: "BeamSearcher", text: str, params: "SearchParams", console: Console | None,
    model: str, as_json: bool,
) -> "SearchOutput":  # fmt: skip
    """Search; when Ctrl-C comes, print the best answer so far and let it pass."""
    from penstock.cli.search_screen import SearchScreen

    try:
        with SearchScreen(console, params, lambda: searcher.place) as screen:
            return searcher.search(
                text, params, on_step=screen.on_step, on_group=screen.on_group,
                on_prefill=screen.on_prefill,
            )  # fmt: skip
    except KeyboardInterrupt:
        output = searcher.so_far
        if output is not None and output.best is not None:
            _tell(output, model, as_json)
        raise


def _tell(output: "SearchOutput", model: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"model": model, **output.as_dict()}))
    else:
        typer.echo(for_reader("" if output.best is None else output.best.text, sys.stdout))


def _scorer(name: str, length_penalty: float, device: str) -> "StepScorer":
    """The scorer of a name; its module may be a file, or lie in the current folder."""
    from penstock.search.step_scorer import LOGPROB, code_folder, load_scorer

    if name != LOGPROB and length_penalty != 1:
        raise ConfigError(f"--length-penalty belongs to --scorer {LOGPROB}, not to {name}")
    folder = code_folder(name)
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))  # behind all that is installed, whose place it never takes
    return load_scorer(name, length_penalty=length_penalty, device=device)


def _check_tree(path: Path, *, force: bool) -> None:
    """Refuse a picture that could not be drawn later.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be one.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--tree needs matplotlib: pip install 'penstock[bench]'")
    from penstock.evaluate.figure_style import PICTURE, check_kind

    check_kind(path)
    check_writable(path, "--tree", PICTURE, force=force)
