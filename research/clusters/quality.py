"""`python -m research.clusters.quality`: what long outputs lose under each kind of clusters.

Source: DynaKV, section 8.2 (Fig. 10a), whose answers are graded; here the output is forced, so that
all methods see the same tokens at every place: how often the next one is the likeliest, what it
costs (nats), and how often the likeliest is that of full attention. All methods select the same
number of tokens beside the same sinks and window; tokens are found for whole outputs of a task that
the bundled model can do, or a text that any model reads on. With `--traces` many processes can
share the work: each keeps what its methods say there, and a last run takes it all from there.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.regular_file import open_regular
from penstock.evaluate.accuracy_settings import Setting, parse_settings
from penstock.evaluate.entry import run_program
from penstock.evaluate.machine import describe_machine
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, without_path
from penstock.evaluate.sitting import closed
from penstock.evaluate.text_table import format_table
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel, load
from penstock.models.plain_model import share_weights
from research.clusters.end_to_end_table import NO_CLUSTERS
from research.clusters.recording import RING_WALK, answer_of, model_name, read_on
from research.clusters.steps import ForcedText

# What methods say of a document, token by token, kept in files that many processes share ----------

_MEANING = "decoded tokens of the output"
"""Of what a file holds; part of its name, since earlier files began before the output."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One method's answers to one document, behind each decoded token of the output."""

    likeliest: NDArray[np.int64]
    """[steps]"""
    nats: NDArray[np.float64]
    """What the text's own next token costs. [steps]"""


class DocumentTokens(NamedTuple):
    """What is read: a prompt, and the output that is forced behind it."""

    number: int
    ids: list[int]
    prompt: int
    """How many of them are the prompt."""


class Found(NamedTuple):
    """What was said, and what is known of the cache that said it."""

    trace: Trace
    known: dict[str, Any]


class TraceFolder:
    """One file for each method and document; its name has a digest of all that matters to it."""

    def __init__(self, folder: str | None, model: str, chunk: int) -> None:
        """Make the folder where it does not exist.

        Args:
            folder: None: nothing is kept and nothing found.
            chunk: tokens per forward pass of the prefill.

        Raises:
            ConfigError: the folder cannot be made.
        """
        self._folder = None if folder is None else Path(folder)
        self._model, self._chunk = model, chunk
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--traces cannot be a folder: {error}") from error

    def _path(self, setting: Setting, document: DocumentTokens) -> Path | None:
        if self._folder is None:
            return None
        options = sorted(dataclasses.asdict(setting.policy).items())
        read = [_MEANING, self._model, self._chunk, document.ids, document.prompt]
        what = [*read, setting.text, options, setting.memory]
        digest = hashlib.sha256(json.dumps(what, default=str).encode())
        name = f"{self._model}-{document.number}-{setting.policy.name}-{digest.hexdigest()[:16]}"
        return self._folder / f"{name}.npz"

    def find(self, setting: Setting, document: DocumentTokens) -> Found | None:
        """What the method said of the document, if that is there.

        Raises:
            ConfigError: the file is there and cannot be read.
        """
        path = self._path(setting, document)
        if path is None or not path.exists():
            return None
        try:
            with open_regular(path) as file, np.load(file) as kept:
                trace = Trace(kept["likeliest"], kept["nats"])
                return Found(trace, json.loads(str(kept["known"])))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path.name} of --traces cannot be read; delete it") from error

    def keep(self, setting: Setting, document: DocumentTokens, found: Found) -> None:
        """Write a file atomically."""
        path = self._path(setting, document)
        if path is None:
            return
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("wb") as file:
            np.savez_compressed(
                file, likeliest=found.trace.likeliest, nats=found.trace.nats,
                known=np.array(json.dumps(found.known | {"cpu": describe_machine()["cpu"]})),
            )  # fmt: skip
        partial.replace(path)


# What long outputs lose under each kind of clusters -----------------------------------------------

KIND = "clusters.quality"
FULL = "full"
METHODS = (
    FULL, NO_CLUSTERS, "dynakv", "dynakv:update=static,layout=tokens",
    "dynakv:update=local,layout=tokens", "pqcache", "clusterkv",
)  # fmt: skip
PARTS = 8
"""Parts of the output that are told apart."""
_SAY_STEPS = 64


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, a released one, or a folder")
    add("--text", metavar="FILE", help="read this text on, in place of a task")
    add("--task", default=RING_WALK, help="whose right answer is the output")
    add("--prompt", type=int, default=1024, help="tokens of the prompt")
    add("--max-new-tokens", dest="output", type=int, default=4096,
        help="most tokens of the output")  # fmt: skip
    add("--documents", type=int, default=2, help="documents, or places in the text")
    add("--document", type=int, help="of these, only the one with this number, from 0 on")
    add("--selected", type=int, default=256, help="tokens that every method selects")
    add("--window", type=int, default=64, help="newest tokens that all attend to")
    add("--methods", default=";".join(METHODS), help="as in penstock bench accuracy")
    add("--chunk", type=int, default=512, help="tokens per forward pass of the prefill")
    add("--traces", metavar="FOLDER",
        help="keep what each method says of a document here, and do not ask again")  # fmt: skip
    add("--kept", action="store_true",
        help="run nothing: documents of which --traces has all methods")  # fmt: skip
    args = read_options(
        parser, arguments, resume=False, minutes=False,
        renamed_with_out={"--output": "--max-new-tokens"},
    )  # fmt: skip
    if min(args.prompt, args.documents, args.selected, args.chunk) < 1 or args.output <= PARTS:
        raise ConfigError(f"sizes count from 1 on, --max-new-tokens from {PARTS + 1} on")
    if args.kept and not args.traces:
        raise ConfigError("--kept takes what is in the folder of --traces; name it")
    if args.document is not None and not 0 <= args.document < args.documents:
        raise ConfigError(f"--document {args.document} is not one of {args.documents}, from 0 on")
    return args


def methods_of(args: argparse.Namespace) -> list[Setting]:
    """Full attention, and the methods with as many selected tokens each.

    Raises:
        ConfigError: there is no such method, or it has no such option.
    """
    out = []
    for setting in parse_settings([args.methods]):
        policy: Any = setting.policy
        known = {field.name for field in dataclasses.fields(policy)}
        same = {"selected_tokens": args.selected, "window_tokens": args.window}
        policy = replace(policy, **{k: v for k, v in same.items() if k in known})
        out.append(replace(setting, policy=policy))
    return sorted(out, key=lambda setting: setting.text != FULL)


def documents(loaded: LoadedModel, args: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Tokens of each document, and how many of them are the prompt.

    Raises:
        PenstockError: bad input.
    """
    if not args.text:
        seeds = range(args.seed, args.seed + args.documents)
        return [
            answer_of(
                loaded, args.task, prompt_tokens=args.prompt, output_tokens=args.output, seed=seed
            )
            for seed in seeds
        ]
    each = args.prompt + args.output
    ids = read_on(loaded, args.text, prompt_tokens=args.prompt,
                  output_tokens=args.documents * each - args.prompt)  # fmt: skip
    return [(ids[i * each : (i + 1) * each], args.prompt) for i in range(args.documents)]


def decode(
    loaded: LoadedModel, text: ForcedText, setting: Setting, on_step: Any
) -> tuple[Trace, dict[str, Any]]:
    """Force the output through a method's cache.

    Returns:
        What it says behind each decoded token of the output, and what is known of the cache.

    Raises:
        PenstockError: the cache cannot be made, or failed.
    """
    model: Any = share_weights(loaded.model)
    end = int(text.ids.shape[1])
    cache = TieredCache(model, setting.policy, memory=setting.memory, store="memory",
                        max_tokens=end)  # fmt: skip
    likeliest, nats = [], []
    with cache, torch.no_grad():
        text.prefill.put_into(cache)

        def forward(first: int, stop: int) -> Tensor:
            out = model(
                text.ids[:, first:stop], **cache_argument(model, cache), use_cache=True,
                position_ids=torch.arange(first, stop)[None], logits_to_keep=1,
            )  # fmt: skip
            logits: Tensor = out.logits[0, -1]
            return logits

        forward(cache.get_seq_length(), text.prompt_tokens)
        for at in range(text.prompt_tokens, end - 1):
            logits = forward(at, at + 1).double().log_softmax(dim=-1)
            likeliest.append(int(logits.argmax()))
            nats.append(-float(logits[text.ids[0, at + 1]]))
            on_step(at)
        counted, report = cache.stats.decode, cache.report()
        known = {
            "ledger_bytes": report.used_bytes, "full_bytes": report.full_cache_bytes,
            "units_wanted": counted.units_wanted, "units_hit": counted.units_hit,
            "selected": cache.plan.selected_units,
        }  # fmt: skip
    return Trace(np.array(likeliest), np.array(nats)), known


def cell(trace: Trace, full: Trace | None, right: NDArray[np.int64]) -> dict[str, Any]:
    """Figures of one method and document, whole and by part of the output."""
    size = len(trace.nats)
    part = np.arange(size) * PARTS // size

    def by_part(values: NDArray[Any]) -> list[float]:
        return [float(values[part == i].mean()) for i in range(PARTS)]

    hits = trace.likeliest == right[-size:]
    figures: dict[str, Any] = {
        "steps": size, "right": float(hits.mean()), "nats": float(trace.nats.mean()),
        "right_by_part": by_part(hits), "nats_by_part": by_part(trace.nats),
    }  # fmt: skip
    if full is not None:
        same = trace.likeliest == full.likeliest
        figures |= {"as_full": float(same.mean()), "as_full_by_part": by_part(same)}
        figures["nats_over_full"] = float((trace.nats - full.nats).mean())
    return figures


def measure(args: argparse.Namespace, result: Result) -> None:
    """All documents through all methods.

    Raises:
        PenstockError: bad input; a method that fails has its reason in the result.
    """
    loaded = load(args.model)
    settings = methods_of(args)
    texts = list(enumerate(documents(loaded, args)))
    if args.document is not None:
        texts = [texts[args.document]]
    progress = Progress(sum(len(ids) - prompt - 1 for _, (ids, prompt) in texts) * len(settings))
    result.figures.update(model=model_name(args.model), rows=[])
    kept = TraceFolder(args.traces, model_name(args.model), args.chunk)
    for number, (ids, prompt) in texts:
        document = _Document(loaded, number, ids, prompt, args.chunk)
        if args.kept and not all(kept.find(setting, document.tokens) for setting in settings):
            progress.say(f"document {number + 1} is left out: not all methods are kept")
            continue
        right, full = np.array(ids[1:]), None
        for setting in settings:
            row: dict[str, Any] = {"method": setting.text, "document": number, "prompt": prompt}
            try:
                if (found := kept.find(setting, document.tokens)) is not None:
                    progress.skip(len(found.trace.nats))
                else:
                    found = Found(*document.ask(setting, progress))
                    kept.keep(setting, document.tokens, found)
            except PenstockError as error:
                result.figures["rows"].append(row | {"error": str(error)})
                continue
            full = found.trace if setting.text == FULL else full
            result.figures["rows"].append(row | cell(found.trace, full, right) | found.known)
            if args.out:
                result.save(args.out)


class _Document:
    """A document, prefilled when the first method is asked about it."""

    def __init__(
        self, loaded: LoadedModel, number: int, ids: list[int], prompt: int, chunk: int
    ) -> None:
        self._loaded, self._number, self._chunk = loaded, number, chunk
        self.tokens = DocumentTokens(number, ids, prompt)
        self._text: ForcedText | None = None

    def ask(self, setting: Setting, progress: Progress) -> tuple[Trace, dict[str, Any]]:
        """See `decode`."""
        _, ids, prompt = self.tokens
        if self._text is None:
            self._text = ForcedText(self._loaded, ids, len(ids) - prompt, self._chunk)
        done = 0

        def on_step(at: int) -> None:
            nonlocal done
            done += 1
            progress.step(1)
            if done % _SAY_STEPS == 0:
                progress.say(f"document {self._number + 1}, {setting.text}, token {at}")

        return decode(self._loaded, self._text, setting, on_step)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over documents, a method each."""
    out = []
    for method in dict.fromkeys(row["method"] for row in rows):
        found = [row for row in rows if row["method"] == method]
        good = [row for row in found if "error" not in row]
        if not good:
            out.append({"method": method, "error": found[0]["error"]})
            continue
        names = ("right", "nats", "as_full", "nats_over_full")
        means = {k: float(np.mean([row[k] for row in good])) for k in names if k in good[0]}
        last = {
            k: [float(np.mean(column)) for column in zip(*(row[k] for row in good), strict=True)]
            for k in ("right_by_part", "nats_by_part", "as_full_by_part") if k in good[0]
        }  # fmt: skip
        out.append({"method": method, "documents": len(good)} | means | last)
    return out


def quality_table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures for people."""
    head = ["method", "right", "last eighth", "nats", "over full", "as full"]
    lines = []
    for row in summary(rows):
        if "error" in row:
            lines.append([row["method"], row["error"], "", "", "", ""])
            continue
        lines.append([
            row["method"], f"{row['right']:.3f}", f"{row['right_by_part'][-1]:.3f}",
            f"{row['nats']:.3f}", f"{row.get('nats_over_full', 0):+.3f}",
            f"{row.get('as_full', 1):.3f}",
        ])  # fmt: skip
    return format_table(head, lines)


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, save the result."""
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    private = ("out", "json", "text", "traces", "document", "kept")
    settings = {k: v for k, v in vars(args).items() if k not in private}
    settings |= {"model": model_name(args.model), "output_of": "file" if args.text else args.task}
    shown = without_path(arguments, "--text", args.text)
    shown = without_path(shown, "--traces", args.traces)
    result = Result.begin(KIND, shown, settings, seed=args.seed, package="research")
    measure(args, result)
    result.figures["methods"] = summary(result.figures["rows"])
    return closed(result, args, quality_table(result.figures["rows"]))


if __name__ == "__main__":
    run_program(run)
