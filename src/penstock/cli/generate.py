"""`penstock generate`: answer a prompt from a file or the command line."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.cli.console import PlainConsole
from penstock.cli.model_options import OfflineOption, RevisionOption, TrustOption
from penstock.cli.options import (
    AdapterOption,
    AnswersOption,
    ChunkOption,
    ConfigOption,
    DeviceCopiesOption,
    DeviceKeyOption,
    DeviceMemoryOption,
    DeviceOption,
    DevicesOption,
    DeviceTlsOption,
    DiskOption,
    DtypeOption,
    ExactOption,
    IgnoreEndOption,
    ImageOption,
    JsonOption,
    MaxNewTokensOption,
    MemoryOption,
    MessagesOption,
    MinPOption,
    ModelArgument,
    PromptFileOption,
    PromptOption,
    RawOption,
    RepetitionOption,
    SealOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    TraceOption,
    TunedPolicyOption,
    VerifyOption,
    VideoOption,
    WeightsOption,
    sampling_params,
)
from penstock.cli.output_file import ForceOption, check_writable, written
from penstock.cli.process_sizes import ProcessSizes
from penstock.cli.prompts import Asked
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.core.stats import PhaseStats
    from penstock.engine.policy import SelectionPolicy
    from penstock.generation.output import RequestOutput


def generate_command(
    ctx: typer.Context, model: ModelArgument = "recall", prompt: PromptOption = None,
    prompt_file: PromptFileOption = None, messages: MessagesOption = None,
    image: ImageOption = None, video: VideoOption = None,
    system: SystemOption = None, raw: RawOption = False, config: ConfigOption = None,
    policy: TunedPolicyOption = None, memory: MemoryOption = "auto", disk: DiskOption = "auto",
    max_new_tokens: MaxNewTokensOption = 128, exact: ExactOption = False,
    verify: VerifyOption = None, adapter: AdapterOption = None, n: AnswersOption = 1,
    temperature: TemperatureOption = 0.0, top_p: TopPOption = 1.0,
    top_k: TopKOption = 0, min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0, seed: SeedOption = None, stop: StopOption = None,
    ignore_end: IgnoreEndOption = False,
    seal: SealOption = None, chunk: ChunkOption = 1024, device: DeviceOption = "cpu",
    dtype: DtypeOption = None, weights: WeightsOption = None, revision: RevisionOption = None,
    offline: OfflineOption = False, trust_remote_code: TrustOption = False,
    as_json: JsonOption = False, trace: TraceOption = None, force: ForceOption = False,
    devices: DevicesOption = None, device_key: DeviceKeyOption = None,
    device_copies: DeviceCopiesOption = 1, device_memory: DeviceMemoryOption = None,
    device_tls: DeviceTlsOption = None,
) -> None:  # fmt: skip
    """Answer a prompt, by the model's chat template where it has one.

    The answer goes to stdout, progress and the end table to stderr.
    """
    from penstock.cli.loading import loading
    from penstock.cli.screen import AnswerScreen, show_report
    from penstock.core.trace import TRACE, Tracer
    from penstock.generation.engine import LLM

    console = PlainConsole(stderr=True)
    params = sampling_params(
        n=n, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop,
        repetition_penalty=repetition_penalty, max_new_tokens=max_new_tokens, ignore_end=ignore_end,
    )  # fmt: skip
    asked = Asked.of(
        prompt, prompt_file, messages, system=system, raw=raw, images=image or (),
        videos=video or (),
    )  # fmt: skip
    tracer = None if trace is None else Tracer()
    if trace is not None:
        check_writable(trace, "--trace", TRACE, force=force)
    near = ctx.with_resource(reached(devices, device_key, device_tls))
    with loading(console, model) as progress:
        llm = LLM(
            model,
            policy=with_devices(
                policy, near, device_key, device_copies, device_memory, device_tls
            ),
            memory=memory, store=disk, exact=exact, verify=verify, adapter=adapter, device=device,
            dtype=None if dtype is None else dtype.value,
            quantization=None if weights is None else weights.value,
            config=config, prefill_chunk_size=chunk, seal="auto" if seal is None else seal,
            revision=revision, offline=offline or None, trust_remote_code=trust_remote_code,
            on_bytes=progress.update,
        )  # fmt: skip
    quiet = as_json and not console.is_terminal
    with AnswerScreen(None if quiet else console, None if as_json else sys.stdout) as screen:
        [output] = asked.put_to(
            llm, params, on_text=screen.on_text, on_progress=screen.on_progress,
            on_index=screen.on_index, tracer=tracer,
        )  # fmt: skip
    sizes = ProcessSizes.of(llm.model)
    if as_json:
        typer.echo(json.dumps(as_document(model, output, sizes)))
    else:
        show_report(console, output.run, sizes)
    if tracer is not None and trace is not None:
        written(tracer.write, trace, "the trace")


@contextmanager
def reached(
    devices: str | None, key_file: str | None, tls: str | None = None
) -> Iterator[str | None]:
    """Near-storage devices by their addresses; those of a Ray cluster are asked of it.

    Raises:
        ConfigError: Ray or its cluster is missing, there is no key, or TLS is asked of actors.
        StorageError: a device does not start.
    """
    if devices is None or not devices.startswith("ray:"):
        yield devices
        return
    if tls:
        raise ConfigError(
            "--device-tls is for --devices tcp://...: actors of ray:N speak without TLS"
        )
    from penstock.cluster.ray_devices import borrowed

    if key_file is None:
        raise ConfigError("--devices ray:N wants --device-key-file")
    with borrowed(devices, key_file) as found:
        yield found


def with_devices(
    policy: str | None, devices: str | None, key_file: str | None, copies: int = 1,
    memory: str | None = None, tls: str | None = None,
) -> "SelectionPolicy | str | None":  # fmt: skip
    """The policy on devices of other hosts, or with bounded ones, where that is asked.

    Raises:
        ConfigError: they are no addresses, have no key, or the policy has no use for them.
    """
    if devices is None:
        for given, option in ((copies != 1, "--device-copies"), (tls, "--device-tls")):
            if given:
                raise ConfigError(f"{option} wants --devices")
        if memory is None:
            return policy
    if policy != "hillinfer":
        asked = "--devices" if devices else "--device-memory"
        raise ConfigError(f"{asked} wants --policy hillinfer")
    from penstock.methods.hillinfer.policy import HillInfer

    key = f"file:{key_file}" if key_file else ""
    trust = tls or ""
    if trust and not trust.startswith("sha256:"):
        trust = f"file:{trust}"
    return HillInfer(
        devices=devices or 1, device_key=key, copies=copies, device_memory=memory, device_tls=trust
    )


def in_home(path: Path, option: str) -> Path:
    """A path with ~ in full.

    Raises:
        ConfigError: nobody is called that.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{option} {path}: there is no such home folder") from error


def as_document(model: str, output: "RequestOutput", sizes: ProcessSizes) -> dict[str, object]:
    """The run as plain data for `--json`; bytes and seconds, as the names say."""
    run = output.run
    return {
        "model": model,
        "policy": run.policy,
        "exact": run.exact,
        "answer": output.text,
        "answers": [each.text for each in output.outputs],
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
        "verify": _phase(run.stats.verify),
        "verified": None if run.verified is None else run.verified.as_dict(),
        "memory": asdict(run.memory),
        **asdict(sizes),
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
