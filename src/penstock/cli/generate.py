"""`penstock generate`: answer a prompt from a file or the command line."""

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import PlainConsole
from penstock.cli.model_options import OfflineOption, RevisionOption, TrustOption
from penstock.cli.output_file import ForceOption, check_writable, written
from penstock.core.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from penstock.core.stats import PhaseStats
    from penstock.generation.output import RequestOutput


class Dtype(StrEnum):
    """What `--dtype` takes."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, OWNER/NAME on the Hugging Face hub, or recall for the bundled model.",
    ),
]
PolicyOption = Annotated[str, typer.Option(help="Which past tokens a step attends to.")]
MemoryOption = Annotated[
    str,
    typer.Option(help="Fast memory for the KV cache: 512MiB, 1/13 of the full cache, or auto."),
]
DiskOption = Annotated[
    str,
    typer.Option(
        metavar="PATH|nvme|ufs|emmc|memory|host|auto",
        help="Where the KV cache lies: a folder, a simulated device, memory, memory that a GPU "
        "reads by itself (host), or the temporary folder.",
    ),
]
SealOption = Annotated[
    bool | None,
    typer.Option(
        "--seal/--no-seal",
        help="Encrypt what the cache writes to a disk, with a key that is never written.",
        show_default="where AES is fast",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Where the model computes: cpu or cuda.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Type of weights and cache; as stored when left out.")
]
TraceOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a Chrome trace of compute and I/O."),
]
PrefillChunkOption = Annotated[
    int, typer.Option(metavar="TOKENS", help="Prompt tokens per forward pass.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Made by penstock tune: gives policy, memory and disk where they are auto or left "
        "out.",
    ),
]
TunedPolicyOption = Annotated[
    str | None,
    typer.Option(
        help="Which past tokens a step attends to; auto is what the config picks.",
        show_default="kvswap, or auto with --config",
    ),
]


def generate_command(
    model: ModelArgument = "recall",
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A UTF-8 file with the prompt; - is stdin.")
    ] = None,
    config: ConfigOption = None,
    policy: TunedPolicyOption = None,
    memory: MemoryOption = "auto",
    disk: DiskOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    exact: Annotated[
        bool, typer.Option("--exact", help="Attend to the whole past: the plain model's tokens.")
    ] = False,
    adapter: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Made by penstock calibrate.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    seal: SealOption = None,
    prefill_chunk: PrefillChunkOption = 1024,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    trust_remote_code: TrustOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of the answer.")
    ] = False,
    trace: TraceOption = None,
    force: ForceOption = False,
) -> None:
    """Answer a prompt.

    The answer goes to stdout, progress and the end table to stderr.
    """
    from penstock.cli.loading import loading
    from penstock.cli.screen import AnswerScreen, show_report
    from penstock.core.trace import TRACE, Tracer
    from penstock.generation.engine import LLM
    from penstock.generation.sampling import SamplingParams

    console = PlainConsole(stderr=True)
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} must be at least 1")
    params = SamplingParams(temperature=temperature, max_tokens=max_new_tokens, seed=seed)
    text = read_prompt(prompt, prompt_file)
    tracer = None if trace is None else Tracer()
    if trace is not None:
        check_writable(trace, "--trace", TRACE, force=force)
    with loading(console, model) as progress:
        llm = LLM(
            model, policy=policy, memory=memory, store=disk, exact=exact, adapter=adapter,
            dtype=None if dtype is None else dtype.value, device=device, config=config,
            prefill_chunk_size=prefill_chunk, seal="auto" if seal is None else seal,
            revision=revision, offline=offline or None, trust_remote_code=trust_remote_code,
            on_bytes=progress.update,
        )  # fmt: skip
    quiet = as_json and not console.is_terminal
    with AnswerScreen(None if quiet else console, None if as_json else sys.stdout) as screen:
        [output] = llm.generate(
            text, params, on_text=screen.on_text, on_progress=screen.on_progress,
            on_index=screen.on_index, tracer=tracer,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(as_document(model, output)))
    else:
        show_report(console, output.run)
    if tracer is not None and trace is not None:
        written(tracer.write, trace, "the trace")


def in_home(path: Path, option: str) -> Path:
    """A path with ~ in full.

    Raises:
        ConfigError: nobody is called that.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{option} {path}: there is no such home folder") from error


def as_document(model: str, output: "RequestOutput") -> dict[str, object]:
    """The run as plain data for `--json`; bytes and seconds, as the names say."""
    run = output.run
    return {
        "model": model,
        "policy": run.policy,
        "exact": run.exact,
        "answer": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": run.prompt_tokens,
        "new_tokens": run.new_tokens,
        "prefill_s": run.prefill_s,
        "prefill_tokens_per_s": run.prefill_tokens_per_s,
        "decode_s": run.decode_s,
        "decode_tokens_per_s": run.decode_tokens_per_s,
        "prefill": _phase(run.stats.prefill),
        "decode": _phase(run.stats.decode),
        "memory": asdict(run.memory),
        "store": run.store,
        "simulated": run.simulated,
        "notices": list(run.notices),
    }


def _phase(stats: "PhaseStats") -> dict[str, object]:
    return {
        **stats.as_dict(),
        "hit_rate": stats.hit_rate,
        "stall_share": stats.stall_share,
        "read_bytes_per_token": stats.read_bytes_per_token,
    }


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from whichever option was given.

    Raises:
        ConfigError: both were given, or neither.
        PromptError: the file cannot be read, or it is no text.
    """
    from penstock.generation.prompts import read_text_file, require_text

    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give the prompt with either --prompt or --prompt-file")
    if prompt is not None:
        require_text(prompt, "the prompt")
        return prompt
    assert prompt_file is not None
    if str(prompt_file) == "-":
        return read_stdin("the prompt")
    return read_text_file(prompt_file)


def read_stdin(what: str) -> str:
    """All of stdin; `what` names it in errors.

    Raises:
        PromptError: it is closed, or no text.
    """
    from penstock.generation.prompts import decode_text

    if sys.stdin is None:
        raise PromptError(f"{what} was to come on stdin, which is closed")
    return decode_text(sys.stdin.buffer.read(), f"{what} on stdin")
