"""`penstock audit`: how close policies stay to full attention on a model and a text of yours."""

import argparse
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from torch import Tensor

from penstock.core.atomic_write import require_own
from penstock.core.errors import BudgetError, ConfigError
from penstock.evaluate.accuracy_settings import Setting, parse_settings
from penstock.evaluate.audit.prompts import read_prompts, split_texts
from penstock.evaluate.audit.reference import Reference, end_token_ids, make_reference
from penstock.evaluate.audit.run import Fidelity, follow
from penstock.evaluate.audit.table import audit_table, layer_table
from penstock.evaluate.audit.verdict import (
    BUDGETS,
    LEGEND,
    POLICY,
    TOLERANCE,
    budget_table,
    verdict,
)
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.generation.prompts import PromptBatch, read_text_file
from penstock.models.loader import LoadedModel, load
from penstock.models.model_shape import inspect_model

_SAY_EVERY_S = 2.0
_LEGEND = """\
tokens: attended to by a head at a step, the mean. mass: share of full attention's probability
that falls on them, the mean over heads, steps and layers; the worst layer with its number.
recall@{top}: share of the {top} tokens of the most attention among them. KL: of the next token,
full attention to policy, in nats, the mean over steps. same: steps with the same most likely
token. memory: most fast memory of the cache, and its share of the full cache."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="penstock audit", description=__doc__)
    add = parser.add_argument
    add(
        "--policies", action="append", metavar="LIST",
        help="POLICY@BUDGET:option=value,... separated by commas, in place of --budgets",
    )  # fmt: skip
    add(
        "--budgets", metavar="LIST", default=BUDGETS,
        help=f"of {POLICY}, compared where no --policies are given ({BUDGETS})",
    )  # fmt: skip
    add(
        "--tolerance", type=float, default=TOLERANCE, metavar="NATS",
        help=f"mean KL of a token that the smallest budget is looked for within ({TOLERANCE:g})",
    )  # fmt: skip
    add(
        "--adapter", metavar="FILE|none",
        help="made by penstock calibrate (default: the one that the model finds by itself)",
    )  # fmt: skip
    add("--layers", action="store_true", help="show the attention that each layer keeps")
    add("--figure", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    add("--statistics", action="store_true", help=argparse.SUPPRESS)
    args = read_prompt_options(parser, arguments)
    if args.tolerance <= 0:
        raise ConfigError("--tolerance must be above 0")
    if args.figure:
        _check_figure(args)
    if args.statistics:
        raise ConfigError(
            "penstock audit --statistics is not in the installed package; in a checkout of "
            "Penstock: python -m research.statistics"
        )
    return args


def read_prompt_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> argparse.Namespace:
    """Add the options of what to read and to decode, and read the command line.

    Raises:
        ConfigError: a number is out of its range, or --output cannot be a file.
    """
    add = parser.add_argument
    add("model", nargs="?", default="recall", help="a model folder, or recall (the bundled model)")
    add(
        "--prompt-file", action="append", required=True, metavar="FILE",
        help="UTF-8 text; several times: rows of one batch",
    )  # fmt: skip
    add("--chat", action="store_true", help="ask through the tokenizer's chat template")
    add(
        "--max-new-tokens", dest="new_tokens", type=int, default=32,
        help="most decode steps to compare",
    )  # fmt: skip
    add(
        "--follow-text", action="store_true",
        help="decode the text's own last --max-new-tokens tokens, not what the model would say",
    )  # fmt: skip
    add("--past-end", action="store_true", help="go on behind the model's end of its answer")
    add("--top", type=int, default=64, help="tokens of the most attention that recall is about")
    add("--device", default="cpu", help="cpu or cuda")
    add("--dtype", help="of weights and cache (default: as stored)")
    add("--chunk", type=int, default=1024, help="prompt tokens per forward pass")
    add("--disk", dest="store", default="auto", metavar="memory|DIR", help="where the caches lie")
    args = read_options(
        parser, arguments, seed=False, resume=False, minutes=False,
        renamed={"--store": "--disk", "--new-tokens": "--max-new-tokens"},
    )  # fmt: skip
    if min(args.new_tokens, args.top, args.chunk) < 1:
        raise ConfigError("--max-new-tokens, --top and --chunk must be at least 1")
    if args.follow_text and args.chat:
        raise ConfigError(
            "--follow-text reads on in a text; a question in --chat has no more of it"
        )
    if args.out:
        _check_file(Path(args.out), "--output")
    return args


def _check_figure(args: argparse.Namespace) -> None:
    """Refuse a figure that could not be drawn when the work is done."""
    if args.policies:
        raise ConfigError("--figure draws budgets of one policy; leave out --policies")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--figure needs matplotlib: pip install 'penstock[bench]'")
    from penstock.evaluate.figure_style import PICTURE, check_kind

    check_kind(args.figure)
    _check_file(args.figure, "--figure")
    require_own(args.figure, PICTURE, "--figure")


def _check_file(path: Path, option: str) -> None:
    """Refuse a file that could not be written when the work is done."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; give a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from error


def audit(
    loaded: LoadedModel, prompt: PromptBatch, settings: Sequence[Setting], *,
    new_tokens: int = 32, top: int = 64, chunk: int = 1024, past_end: bool = False,
    following: Tensor | None = None, store: str = "auto", adapter: str | Path | None = None,
    keep: Callable[[Reference, list[Fidelity]], None] = lambda *_: None,
) -> tuple[Reference, list[Fidelity]]:  # fmt: skip
    """Compare settings with full attention on one batch of prompts; progress goes to stderr.

    Args:
        new_tokens: most decode steps.
        top: tokens of the most attention that recall is about.
        chunk: prompt tokens per forward pass.
        past_end: count what comes behind an end-of-sequence token.
        following: tokens to decode, see `split_texts`; None: the likeliest ones.
        store, adapter: where the caches lie, and their low-rank basis; see `TieredCache`.
        keep: called after each setting with what there is.

    Returns:
        What was compared with, and one `Fidelity` for each setting, in their order. A budget that
        is too small is in `Fidelity.refused`.

    Raises:
        PromptError: the answer ends at once.
        UnsupportedModelError: a tiered cache cannot work with the model.
        StorageError: the store cannot be used.
    """
    reading, decoding = Paced(prompt.padded_tokens), Paced(new_tokens)
    reading.start("full attention reads the prompt")

    def on_prefill(done: int) -> None:
        reading.reach(done)
        if done == prompt.padded_tokens:
            decoding.start("full attention decodes")

    reference = make_reference(
        loaded, prompt, new_tokens=new_tokens, chunk=chunk,
        ends=frozenset() if past_end else end_token_ids(loaded), following=following,
        on_prefill=on_prefill, on_step=decoding.reach,
    )  # fmt: skip
    steps = reference.num_steps
    judging = Paced(steps * len(settings))
    audits: list[Fidelity] = []
    for number, setting in enumerate(settings):
        judging.start(setting.text)
        on_step = partial(_reach_behind, judging, number * steps)
        try:
            done = follow(
                loaded.model, setting, reference, top=top, store=store, adapter=adapter,
                on_step=on_step,
            )  # fmt: skip
        except BudgetError as error:
            done = Fidelity(setting=setting.text, refused=str(error))
            judging.skip(steps)
        audits.append(done)
        keep(reference, audits)
    return reference, audits


class Paced:
    """Progress that is said now and then instead of at every step."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._what = ""
        self._said = 0.0
        self._progress: Progress | None = None

    def start(self, what: str) -> None:
        """Say what begins; the clock runs from the first call on."""
        if self._progress is None:
            self._progress = Progress(self._total)
        self._what = what
        self._say()

    def reach(self, done: int) -> None:
        """So much is done."""
        assert self._progress is not None
        self._progress.step(done - self._done)
        self._done = done
        if time.perf_counter() - self._said > _SAY_EVERY_S:
            self._say()

    def skip(self, count: int) -> None:
        """So much need not be done."""
        assert self._progress is not None
        self._progress.skip(count)
        self._done += count

    def _say(self) -> None:
        assert self._progress is not None
        self._said = time.perf_counter()
        self._progress.say(self._what)


def _reach_behind(progress: Paced, before: int, done: int) -> None:
    progress.reach(before + done)


def begin(
    kind: str, arguments: Sequence[str], args: argparse.Namespace, *, policies: list[str],
    package: str = "penstock.evaluate",
) -> Result:  # fmt: skip
    """The result of a run, which shows none of the user's paths.

    Args:
        policies: settings that are compared.
        package: of the program, see `Result.begin`.
    """
    paths = [
        args.model,
        *args.prompt_file,
        *(vars(args).get(each) for each in ("adapter", "figure")),
    ]
    shown = [_hide(word, [str(path) for path in paths if path]) for word in arguments]
    private = ("out", "store", "json", "prompt_file", "adapter", "figure")
    chosen = {k: v for k, v in vars(args).items() if k not in private}
    chosen |= {"model": Path(args.model).name, "policies": policies}
    return Result.begin(kind, shown, chosen, seed=0, store=args.store, package=package)


def open_prompts(args: argparse.Namespace) -> tuple[LoadedModel, PromptBatch, Tensor | None]:
    """The model, its prompts, and the tokens that are decoded with --follow-text.

    Raises:
        PenstockError: the model or a text cannot be read.
    """
    texts = [read_text_file(path) for path in args.prompt_file]
    print(f"loading {args.model}", file=sys.stderr, flush=True)
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    if args.follow_text:
        return loaded, *split_texts(loaded, texts, new_tokens=args.new_tokens)
    prompt = read_prompts(loaded, texts, chat=args.chat, new_tokens=args.new_tokens)
    return loaded, prompt, None


def run(arguments: Sequence[str]) -> Result:
    """Audit what the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    by_budget = [f"{POLICY}@{each.strip()}" for each in args.budgets.split(",") if each.strip()]
    settings = parse_settings(args.policies or by_budget)
    policies = [setting.text for setting in settings]
    result = begin("audit", arguments, args, policies=policies)
    loaded, prompt, following = open_prompts(args)
    shape = inspect_model(loaded.model)

    def keep(reference: Reference, audits: list[Fidelity]) -> None:
        result.figures = {
            "prompt_tokens": [len(ids) for ids in prompt.token_ids],
            "steps": reference.num_steps,
            "counted_steps": int(reference.live.sum()),
            "layers": list(shape.tiered_layers),
            "left_out_layers": sorted(shape.windows),
            "policies": [dataclasses.asdict(each) for each in audits],
        }
        if args.out:
            result.save(args.out)

    _, audits = audit(
        loaded, prompt, settings, new_tokens=args.new_tokens, top=args.top, chunk=args.chunk,
        past_end=args.past_end, following=following, store=args.store, adapter=args.adapter,
        keep=keep,
    )  # fmt: skip
    if args.policies:
        print(report(result, audits))
    else:
        print(budget_report(result, audits, with_layers=args.layers))
    if args.figure:
        from penstock.evaluate.audit.figure import write_audit_figure

        write_audit_figure(
            audits, result.figures["layers"], args.figure, tolerance=args.tolerance,
            title=headline(result),
        )  # fmt: skip
    return closed(result, args)


def budget_report(result: Result, audits: Sequence[Fidelity], *, with_layers: bool = False) -> str:
    """One screen about several budgets, the verdict at its end."""
    figures, tolerance = result.figures, result.settings["tolerance"]
    layers = figures["layers"]
    said = verdict(audits, tolerance)
    result.figures["verdict"] = said
    lines = [
        headline(result),
        "",
        budget_table(audits, layers, tolerance),
        "",
        LEGEND,
        *(fill(remark, 96) for remark in _remarks(figures, audits)),
        "",
        fill(said, 96),
    ]
    if with_layers and any(each.refused is None for each in audits):
        lines[-2:-2] = ["", "attention kept, by layer", "", layer_table(audits, layers)]
    return "\n".join(lines)


def report(result: Result, audits: Sequence[Fidelity]) -> str:
    """The tables of an audit, and what their columns mean."""
    figures, top = result.figures, result.settings["top"]
    layers = figures["layers"]
    lines = [
        headline(result),
        "",
        audit_table(audits, layers, top),
        "",
        _LEGEND.format(top=top),
        *_remarks(figures, audits),
    ]
    if any(each.refused is None for each in audits):
        lines += ["", "attention mass captured, by layer", "", layer_table(audits, layers)]
    return "\n".join(lines)


def headline(result: Result) -> str:
    """What was read and decoded."""
    figures = result.figures
    rows = ", ".join(f"{count:,}" for count in figures["prompt_tokens"])
    return f"{result.settings['model']}: {rows} tokens of prompt, {figures['steps']} decode steps"


def left_out_lines(figures: dict[str, Any]) -> list[str]:
    """A line about layers that no policy selects in, where there are any."""
    left_out = ", ".join(map(str, figures["left_out_layers"]))
    if not left_out:
        return []
    return [f"left out: layers with a window of their own, always whole: {left_out}"]


def _remarks(figures: dict[str, Any], audits: Sequence[Fidelity]) -> list[str]:
    remarks = []
    if any(each.per_head and each.refused is None for each in audits):
        names = ", ".join(each.setting for each in audits if each.per_head)
        remarks.append(f"selects per KV head, and its recall is per head: {names}")
    remarks += left_out_lines(figures)
    done = [each for each in audits if each.refused is None]
    common = [
        note for note in (done[0].notices if done else ()) if all(note in e.notices for e in done)
    ]
    remarks += common
    remarks += [
        f"{each.setting}: {note}" for each in done for note in each.notices if note not in common
    ]
    return remarks


def _hide(word: str, private: Sequence[str]) -> str:
    """An argument with paths of the user's replaced by PATH."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}PATH" if value in private and ("/" in value or "\\" in value) else word
