"""`penstock chat`: a chat at the terminal, on one KV cache that grows from turn to turn."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from penstock.cli.chat_input import ChatInput
from penstock.cli.console import PlainConsole
from penstock.cli.doc_options import KeyOption, key_of
from penstock.cli.generate import in_home
from penstock.cli.loading import ModelSource, load_model
from penstock.cli.model_options import OfflineOption, RevisionOption, TrustOption
from penstock.cli.options import (
    AdapterOption,
    ChunkOption,
    ConfigOption,
    DeviceOption,
    DiskOption,
    Dtype,
    DtypeOption,
    ExactOption,
    ImageOption,
    MaxNewTokensOption,
    MemoryOption,
    SealOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    TunedPolicyOption,
    VerifyOption,
    VideoOption,
    Weights,
    WeightsOption,
    unescaped,
)
from penstock.core.errors import ConfigError, DocumentKeyError

if TYPE_CHECKING:
    from penstock.cli.chat_session import ChatSession


ChatModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model's folder, or its name on the hub; a stored chat knows its own.",
    ),
]
ResumeOption = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Go on with a stored chat, without prefill.")
]
SessionOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Go on with the chat there, if there is one, and store every turn."
    ),
]
FileOption = Annotated[
    list[Path] | None, typer.Option(metavar="PATH", help="Read a text file in first; repeatable.")
]
VariablesOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs", metavar="JSON",
        help='Variables of the chat template, such as \'{"enable_thinking": false}\'.',
    ),
]  # fmt: skip
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        metavar="TOKENS", help="Longest chat; --memory is for so many.",
        show_default="the model's positions",
    ),
]  # fmt: skip


def chat_command(
    context: typer.Context, model: ChatModelArgument = None, resume: ResumeOption = None,
    session: SessionOption = None, file: FileOption = None, image: ImageOption = None,
    video: VideoOption = None,
    system: SystemOption = None, template_kwargs: VariablesOption = None,
    config: ConfigOption = None, policy: TunedPolicyOption = None, memory: MemoryOption = "auto",
    disk: DiskOption = "auto", max_tokens: MaxTokensOption = None,
    max_new_tokens: MaxNewTokensOption = 512, exact: ExactOption = False,
    verify: VerifyOption = None, adapter: AdapterOption = None,
    temperature: TemperatureOption = 0.0, top_p: TopPOption = 1.0,
    top_k: TopKOption = 0, seed: SeedOption = None, stop: StopOption = None,
    seal: SealOption = None, key: KeyOption = None, chunk: ChunkOption = 1024,
    device: DeviceOption = "cpu", dtype: DtypeOption = None,
    weights: WeightsOption = None, revision: RevisionOption = None,
    offline: OfflineOption = False, trust_remote_code: TrustOption = False,
) -> None:  # fmt: skip
    """Chat with a model; each turn prefills what is new in it alone.

    Answers go to stdout, all else to stderr. In a pipe each line is a message. /help lists the
    commands.
    """
    from penstock.cli.chat_session import ChatSession
    from penstock.documents.conversation import Conversation
    from penstock.documents.settings import STORED, DocumentSettings
    from penstock.generation.chat_template import ChatTemplate
    from penstock.generation.sampling import SamplingParams

    console = PlainConsole(stderr=True)
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} must be at least 1")
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_new_tokens,
        stop=tuple(map(unescaped, stop or ())),
    )  # fmt: skip
    session = None if session is None else in_home(session, "--session")
    begun = _begun(resume, session)
    given = {name for name in context.params if _is_typed(context, name)}
    if begun is not None:
        called, stored_dtype, stored_weights = _model_of(begun, key_of(key))
        model = model if "model" in given else called
        dtype = dtype if "dtype" in given else stored_dtype
        weights = weights if "weights" in given else stored_weights
        _check_stored(given, disk)
    if model is None:
        raise ConfigError("give a MODEL: a folder, a name on the hub; or --resume a stored chat")
    how: dict[str, Any] = {
        "template": ChatTemplate(kwargs=_variables(template_kwargs)), "max_tokens": max_tokens,
        "exact": exact, "verify": verify, "seal": "auto" if seal is None else seal,
        "settings": DocumentSettings(
            key=key_of(key), store=disk, adapter=adapter, prefill_chunk_size=chunk
        ),
    }  # fmt: skip
    loaded = load_model(
        console, model, dtype=None if dtype is None else dtype.value, device=device,
        weights=weights, source=ModelSource(revision, offline, trust_remote_code),
    )  # fmt: skip

    def open_stored(path: Path, on_tokens: Callable[[int, int], None]) -> Conversation:
        kept = memory if "memory" in given else STORED
        return Conversation.resume(loaded, path, memory=kept, on_tokens=on_tokens, **how)

    begins: dict[str, Any] = {
        "system": system, "policy": policy, "memory": memory, "config": config,
    }  # fmt: skip
    chat = Conversation(loaded, **begins, **how) if begun is None else None
    with ChatSession(
        chat, open_stored, params, console=console, out=sys.stdout,
        is_terminal=_is_terminal(sys.stdin), session=session,
    ) as talk:  # fmt: skip
        _converse(talk, begun, file or [], loaded.name, image or (), video or ())


def _begun(resume: Path | None, session: Path | None) -> Path | None:
    """The folder of the chat to go on with, if any.

    Raises:
        ConfigError: both options were given.
    """
    if resume is None:
        return session if session is not None and session.exists() else None
    if session is not None:
        raise ConfigError("give one of --resume and --session; --session resumes too")
    return in_home(resume, "--resume")


def _converse(
    talk: "ChatSession", begun: Path | None, files: list[Path], model: str,
    images: Iterable[Path], videos: Iterable[Path],
) -> None:  # fmt: skip
    from penstock.cli.chat_session import COMMANDS

    if begun is not None:
        talk.resume(begun)
    for path in files:
        talk.read_file(in_home(path, "--file"))
    talk.show(images, videos)
    talk.greet(model)
    talk.run(_messages(_is_terminal(sys.stdin), [*COMMANDS]))


def _messages(is_terminal: bool, commands: list[str]) -> ChatInput:
    """What comes on stdin; prompts are for a person."""
    prompts = None
    if is_terminal:
        prompts = sys.stdout if _is_terminal(sys.stdout) else sys.stderr
    return ChatInput(sys.stdin, prompts=prompts, commands=commands)


def _is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line, and is no default of the user's settings."""
    source: Any = context.get_parameter_source(name)
    return getattr(source, "name", "") == "COMMANDLINE"


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _check_stored(given: set[str], disk: str) -> None:
    """Refuse what a stored chat has of its own.

    Raises:
        ConfigError: names it.
    """
    from penstock.storage.store import parse_location

    for name in ("policy", "config", "system"):
        if name in given:
            raise ConfigError(f"a stored chat has its own {name}; leave --{name} out")
    if parse_location(disk)[0] is not None:
        raise ConfigError(
            f"--disk {disk} is simulated, and a stored chat lies on a real disk; leave it out"
        )


def _model_of(path: Path, key: bytes | None) -> tuple[str, Dtype | None, Weights | None]:
    """What the model of a stored chat was called, the type and the bits that it was loaded in.

    Raises:
        DocumentError: there is none.
        DocumentKeyError: it is encrypted, and there is no key.
    """
    from penstock.models.identity import weights_of
    from penstock.storage.documents import read_summary

    summary = read_summary(path, key)
    if summary.about is None or summary.identity is None:
        raise DocumentKeyError(f"the chat in {path} is encrypted; give its --key")
    dtype = summary.identity.get("dtype")
    known = Dtype(dtype) if dtype in list(Dtype) else None
    bits = weights_of(summary.identity)
    weights = Weights(bits) if bits in list(Weights) else None
    return str(summary.about.get("model")), known, weights


def _variables(text: str | None) -> dict[str, Any]:
    """Variables of a chat template.

    Raises:
        ConfigError: it is no JSON object.
    """
    try:
        found = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError('--chat-template-kwargs is a JSON object, such as {"name": "value"}')
    return found
