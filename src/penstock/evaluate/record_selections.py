"""`penstock bench record`: take down what a policy selects on a real model, for throughput rows."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.core.renamed_options import under_new_names
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.answers import Question, SharedPrefill, ask
from penstock.evaluate.entry import run_program
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import recording_file
from penstock.evaluate.tasks import GeneratedTasks
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel, load
from penstock.workloads.recorded_stream import Recorder, Recording
from penstock.workloads.selection_streams import streamed

EPILOG = """\
A recording is made on a model that has learnt to attend: the selections of random weights have no
locality. `penstock bench throughput --stream FILE` plays it on any model and context: units keep
their share of the context, so that what was selected at 30 % of 8K tokens is selected at 30 % of
32K. The end of the answer is suppressed until all steps are done; tasks with long answers (copy,
pointer_chasing) keep the model busy for more of them."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="penstock bench record", description=__doc__, epilog=EPILOG
    )
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, or a folder")
    add("--tokens", type=int, default=8192, help="length of the prompt")
    add("--task", default="multi_key_few", help="what is asked, see penstock bench accuracy")
    add("--steps", type=int, default=64, help="decode steps")
    add("--policy", default="kvswap@1/13", help="POLICY@BUDGET:option=value,...")
    add("--sample", type=int, default=0, help="number of the task's sample")
    add("--chunk", type=int, default=2048, help="tokens per forward pass of the prompt")
    add("--disk", dest="store", default="auto", help="directory of the cache, or memory")
    add("--seed", type=int, default=0)
    add(
        "-o",
        "--output",
        dest="out",
        type=recording_file,
        required=True,
        metavar="FILE",
        help="the recording (.npz)",
    )
    add("--json", action="store_true", help="print what was recorded as the last line")
    names = {"--store": "--disk", "--out": "--output"}
    args = parser.parse_args(list(under_new_names(arguments, names)))
    if args.steps < 2 or min(args.tokens, args.chunk) < 1 or args.sample < 0:
        raise ConfigError(
            "--steps must be at least 2, --tokens and --chunk at least 1, --sample not negative"
        )
    return args


def record(args: argparse.Namespace) -> Recording:
    """Answer one sample with the policy and take its selections down.

    Raises:
        ConfigError: no such task or policy, or the policy selects nothing.
        BudgetError: the budget is too small.
        ModelLoadError: the model cannot be loaded.
    """
    setting = parse_setting(args.policy)
    progress = Progress(args.tokens + args.steps)
    progress.say(f"loading {args.model}")
    loaded = load(args.model)
    if loaded.tokenizer is None:
        raise ConfigError(f"{args.model} has no tokenizer")
    samples = GeneratedTasks(loaded.tokenizer).draw(
        args.task, args.sample, 1, tokens=args.tokens, seed=args.seed
    )
    question = ask(loaded, samples)
    progress.say(f"prefill of {question.batch.padded_tokens} tokens")
    prefill = SharedPrefill(loaded.model, question, args.chunk)
    progress.step(args.tokens)
    recorder = Recorder()
    with TieredCache(
        loaded.model, streamed(setting.policy, recorder), memory=setting.memory, store=args.store,
        max_tokens=question.batch.padded_tokens + args.steps + 1,
    ) as cache:  # fmt: skip
        prefill.put_into(cache)
        progress.say(f"decoding {args.steps} tokens")
        answer = _decode(loaded, question, cache, args.steps)
    source = {
        "model": Path(args.model).name, "policy": setting.text, "task": args.task,
        "prompt_tokens": question.batch.padded_tokens, "sample": args.sample, "seed": args.seed,
        "answer": answer[:80],
    }  # fmt: skip
    return recorder.recording(source)


def _decode(loaded: LoadedModel, question: Question, cache: TieredCache, steps: int) -> str:
    """Greedily, with no end before all steps are done; the first token is the prefill's."""
    model: Any = loaded.model
    device = model.get_input_embeddings().weight.device
    batch = question.batch
    with torch.no_grad():
        out = model.generate(
            input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device),
            **cache_argument(model, cache), max_new_tokens=steps + 1, min_new_tokens=steps + 1,
            do_sample=False, pad_token_id=question.pad_token_id,
        )  # fmt: skip
    assert loaded.tokenizer is not None
    return str(loaded.tokenizer.decode(out[0, batch.padded_tokens :], skip_special_tokens=True))


def summary(recording: Recording) -> str:
    """What was recorded, in a few lines."""
    steps, layers, rows, wanted = recording.shares.shape
    found = recording.statistics()
    by_layer = ["-" if x is None else f"{100 * x:.0f}" for x in found["by_layer"]]
    text = (
        f"{steps} steps, {layers} layers, rows: {rows}, {wanted} units of "
        f"{recording.group_tokens} tokens at most, {recording.context} tokens of context"
    )
    if found["mean"] is not None:
        text += (
            f"\noverlap of a step's units with the step before: {100 * found['mean']:.1f} % (10th "
            f"percentile {100 * found['p10']:.0f}, 90th {100 * found['p90']:.0f}); by layer: "
            + " ".join(by_layer)
        )
    return text


def run(arguments: Sequence[str]) -> Recording:
    """Record what the command line asks for, save it and say what it is."""
    args = parse_arguments(arguments)
    recording = record(args)
    recording.save(args.out)
    print(summary(recording))
    if args.json:
        plain = {"source": recording.source, "overlap": recording.statistics()}
        print(json.dumps(plain))
    return recording


if __name__ == "__main__":
    run_program(run)
