"""`python -m research.verified`: what verified decoding costs beside exact and full attention."""

import argparse
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.devices.presets import PRESETS
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, without_folder, without_path
from penstock.evaluate.sitting import Sitting, closed
from penstock.evaluate.text_table import format_table
from penstock.generation.chat_template import ChatTemplate
from penstock.generation.engine import LLM
from penstock.generation.prompts import encode, read_text_file
from penstock.generation.sampling import SamplingParams
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel, load
from penstock.models.plain_model import plain_cache
from penstock.models.weight_access import model_device

Row = dict[str, Any]

_MODULES = ("argparse", "ast", "inspect", "tarfile", "typing", "zipfile", "pickle", "subprocess",
            "shutil", "statistics", "textwrap", "turtle", "doctest", "pydoc")  # fmt: skip
"""Of Python's own library: code that every machine has."""
_ASK = "Go through this code function by function, and say of each what it takes and what it does."


def text_of(files: Sequence[Path]) -> str:
    """Files one behind the other; without any, code of Python's own library.

    Raises:
        PromptError: one cannot be read.
    """
    library = Path(sysconfig.get_path("stdlib"))
    # From Python 3.12 on zipfile is a package.
    modules = [library / f"{name}.py" for name in _MODULES]
    paths = files or [
        each if each.exists() else each.with_suffix("") / "__init__.py" for each in modules
    ]
    return "\n".join(read_text_file(path, f"the text {path}") for path in paths)


def prompt_of(loaded: LoadedModel, files: Sequence[Path], ask: str, tokens: int) -> list[int]:
    """A text and a question about it, by the chat template where there is one; about `tokens`.

    Raises:
        ConfigError: the texts are shorter than that, or the model has no tokenizer.
    """
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.name} came without a tokenizer")
    ids = encode(loaded, text_of(files), alone=False)

    def whole(count: int) -> list[int]:
        part = loaded.tokenizer.decode(ids[:count])  # type: ignore[union-attr]
        said = f"{part}\n\n{ask}"
        if getattr(loaded.tokenizer, "chat_template", None):
            message = {"role": "user", "content": said}
            said = ChatTemplate().render(
                loaded.tokenizer, [message], add_generation_prompt=True,
                continue_final_message=False,
            )  # fmt: skip
        return list(encode(loaded, said, alone=False))

    most = tokens - len(whole(0))
    if len(ids) < most:
        raise ConfigError(f"the texts have {len(ids):,} tokens, and {tokens:,} are wanted")
    return whole(most)


@dataclass(frozen=True)
class Run:
    """What all rows have in common."""

    loaded: LoadedModel
    prompt: list[int]
    args: argparse.Namespace

    def plain(self, new_tokens: int) -> Row:
        """transformers' own cache and attention: the tokens that all others must give."""
        model: Any = self.loaded.model
        device = model_device(model)
        ids = torch.tensor([self.prompt], device=device)
        cache = plain_cache(model, "dynamic", len(self.prompt) + new_tokens)
        given = cache_argument(model, cache)
        tokens: list[int] = []
        with torch.no_grad():
            for at in range(0, len(self.prompt), self.args.chunk):
                out = model(ids[:, at : at + self.args.chunk], **given, logits_to_keep=1)
            began_s = self._now()
            while len(tokens) < new_tokens:
                tokens.append(int(out.logits[0, -1].argmax()))
                out = model(torch.tensor([tokens[-1:]], device=device), **given, logits_to_keep=1)
        seconds = self._now() - began_s
        return {"what": "full attention, in memory", "tokens": tokens,
                "seconds_per_token": seconds / new_tokens}  # fmt: skip

    def penstock(self, new_tokens: int, **how: Any) -> Row:
        """A cache of ours; `how`: of `LLM`."""
        args = self.args
        llm = LLM(
            self.loaded, policy=args.policy, memory=args.memory, store=args.disk,
            prefill_chunk_size=args.chunk, **how,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        [output] = llm.generate({"prompt_token_ids": self.prompt}, params, use_tqdm=False)
        run, decode = output.run, output.run.stats.decode
        row = {
            "tokens": output.token_ids, "seconds_per_token": run.decode_s / run.decode_tokens,
            "bytes_per_token": decode.read_bytes / run.decode_tokens,
            "store": without_folder(run.store), "simulated": run.simulated,
            "memory_bytes": run.memory.peak_bytes,
            "full_cache_bytes": run.memory.full_cache_bytes, "hit_rate": decode.hit_rate,
            "notices": list(run.notices),
        }  # fmt: skip
        if run.verified is not None:
            row["verified"] = run.verified.as_dict()
            row["bytes_per_token"] = run.verified.bytes_per_token
        return row

    def _now(self) -> float:
        if model_device(self.loaded.model).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def same_tokens(row: Sequence[int], plain: Sequence[int]) -> int:
    """How many tokens are those of full attention, from the first on."""
    pairs = zip(row, plain, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(row), len(plain)))


def table(figures: dict[str, Any]) -> str:
    """A row for each way to decode."""
    rows = figures["rows"]
    exact = next((each["seconds_per_token"] for each in rows if each["what"] == "exact"), None)
    cells = [
        [
            row["what"],
            f"{1000 * row['seconds_per_token']:.0f}",
            "-" if exact is None else f"{exact / row['seconds_per_token']:.2f}",
            f"{row['bytes_per_token'] / 2**20:.1f}" if "bytes_per_token" in row else "-",
            f"{row['verified']['tokens_per_pass']:.2f}" if "verified" in row else "-",
            f"{row['verified']['accepted_share']:.0%}" if "verified" in row else "-",
            f"{row['same_tokens']:,} of {len(row['tokens']):,}",
        ]
        for row in rows
    ]
    header = ["", "ms a token", "times exact", "MiB read", "tokens a pass", "accepted", "same"]
    mark = " (simulated)" if any(row.get("simulated") for row in rows) else ""
    return (
        f"{figures['model']}, {figures['prompt_tokens']:,} tokens, {figures['disk']}{mark}\n"
        + format_table(header, cells)
    )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.verified", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="folder or name")
    add("--text", type=Path, action="append", metavar="FILE", help="default: Python's own library")
    add("--ask", default=_ASK, help="the question behind the text")
    add("--tokens", type=int, default=2000, help="length of the prompt")
    add("--new-tokens", type=int, default=64)
    add("--exact-tokens", type=int, default=8, help="tokens of exact mode; 0: it is left out")
    add("--policy-tokens", type=int, help="of the policy alone; default: all; 0: it is left out")
    add("--verify", type=int, nargs="+", default=[4, 8, 16], metavar="K", help="lengths of drafts")
    add("--policy", default="kvswap")
    add("--memory", default="1/13")
    add("--disk", default="emmc")
    add("--device", default="cpu")
    add("--dtype", default="float32")
    add("--chunk", type=int, default=1024)
    return read_options(parser, arguments, seed=False, resume=False, minutes=False)


def begun(kind: str, arguments: Sequence[str], args: argparse.Namespace) -> Result:
    """A result whose settings and command have names of files, and no folders."""
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "json")}
    settings |= {"model": Path(args.model).name, "text": args.text or []}
    if args.disk not in ("auto", "memory", "host", *PRESETS):
        settings["disk"] = "folder"
    for name, value in settings.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Path):
                option = f"--{name.replace('_', '-')}"
                arguments = without_path(arguments, option, str(each))
        settings[name] = _without_folders(value)
    return Result.begin(kind, arguments, settings, seed=0, store=args.disk, package="research")


def _without_folders(value: Any) -> Any:
    """A setting as a result keeps it: of files their names."""
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return value.name if isinstance(value, Path) else value


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, and save the result.

    Raises:
        PenstockError: bad input, or a disk that fails.
    """
    args = parse_arguments(arguments)
    result = begun("verified", arguments, args)
    sitting = Sitting(result, args)
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    job = Run(loaded, prompt_of(loaded, args.text or [], args.ask, args.tokens), args)
    rows: list[Row] = []
    figures = {
        "model": Path(args.model).name, "prompt_tokens": len(job.prompt),
        "disk": result.settings["disk"], "rows": rows,
    }  # fmt: skip
    alone = args.new_tokens if args.policy_tokens is None else args.policy_tokens
    jobs: list[tuple[str, int, dict[str, Any]]] = [
        ("full attention, in memory", args.new_tokens, {}),
        *([("exact", args.exact_tokens + 1, {"exact": True})] if args.exact_tokens else []),
        *([(args.policy, alone, {})] if alone else []),
        *((f"verify={drafts}", args.new_tokens, {"verify": drafts}) for drafts in args.verify),
    ]
    progress = Progress(len(jobs))
    for what, count, how in jobs:
        progress.say(what)
        made = job.plain(count) if not rows else job.penstock(count, **how)
        row = {"what": what, **made}
        row["same_tokens"] = same_tokens(row["tokens"], (rows or [row])[0]["tokens"])
        rows.append(row)
        progress.step(1)
        sitting.keep(figures)
    return closed(result, args, table(figures))
