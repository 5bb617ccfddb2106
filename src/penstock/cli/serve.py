"""`penstock serve`: the APIs that clients of language models speak, and a page, over one engine."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import PlainConsole, say
from penstock.cli.doc_options import KeyOption
from penstock.cli.generate import in_home
from penstock.cli.loading import ModelSource
from penstock.cli.log import log_as_json
from penstock.cli.model_options import OfflineOption, RevisionOption, TrustOption
from penstock.cli.options import (
    AdapterOption,
    ChunkOption,
    ConfigOption,
    DeviceOption,
    DiskOption,
    DtypeOption,
    ExactOption,
    MaxNewTokensOption,
    MemoryOption,
    ModelArgument,
    SealOption,
    TunedPolicyOption,
    WeightsOption,
)
from penstock.cli.served import ServedModel, open_app
from penstock.cli.served_replicas import open_front
from penstock.core.byte_size import format_bytes, parse_bytes
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.server.app import Application
_LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")

HostOption = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Listen there; 0.0.0.0 is every network.")
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE", help="Answer those alone who bring this key: file:PATH or env:NAME."
    ),
]
ServedNameOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="What clients call the model.", show_default="MODEL's last part"
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--max-context", metavar="TOKENS", help="Longest prompt and answer.",
        show_default="the model's positions",
    ),
]  # fmt: skip
RunningOption = Annotated[
    int, typer.Option(min=1, help="Most requests at a time; --memory is divided by it.")
]
WaitingOption = Annotated[
    int, typer.Option(min=0, help="Most requests that wait; more are told to come later (429).")
]
BodyOption = Annotated[str, typer.Option(metavar="SIZE", help="Largest request.")]
ImagesOption = Annotated[int, typer.Option(min=0, help="Most pictures of a request.")]
TimeoutOption = Annotated[
    float, typer.Option(metavar="SECONDS", help="Longest request, its waiting included.")
]
GraceOption = Annotated[
    float, typer.Option(metavar="SECONDS", help="For answers under way when it is told to end.")
]
OriginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin", metavar="ORIGIN", help="Another page that may ask; repeatable; * is all."
    ),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host", metavar="NAME",
        help="A further name of this server, such as a proxy's; repeatable.",
    ),
]  # fmt: skip
ShelfOption = Annotated[
    Path | None,
    typer.Option(
        "--library", metavar="DIR", help="The folder with the documents.",
        show_default="the user's data",
    ),
]  # fmt: skip
SessionsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Store conversations there, encrypted, and go on from them without reading them "
        "again; without --key, the key is in DIR.key: a copy of DIR alone cannot be read.",
    ),
]
MaxDiskOption = Annotated[
    str, typer.Option(metavar="SIZE", help="Most bytes of stored conversations; the oldest go.")
]
LogJsonOption = Annotated[
    bool, typer.Option("--log-json", help="Log each request as a line of JSON on stderr.")
]
ReplicasOption = Annotated[
    int,
    typer.Option(
        min=0, help="Run so many servers behind the address, by Ray, each with its own --memory; "
        "SIGUSR1 restarts them one by one.", show_default="none: this process answers",
    ),
]  # fmt: skip
MostReplicasOption = Annotated[
    int | None,
    typer.Option(
        "--max-replicas", metavar="N", min=1, show_default="--replicas",
        help="Start further servers while all are full, up to so many, and stop them later.",
    ),
]  # fmt: skip
AtRandomOption = Annotated[
    bool, typer.Option("--at-random", help="Send requests to any replica, to compare with.")
]
RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="Of the Ray cluster that places --replicas.",
        show_default="one that is started here",
    ),
]  # fmt: skip
CheckOption = Annotated[
    bool, typer.Option("--check", help="Load, listen, ask everything once, and end.")
]


def serve_command(
    model: ModelArgument, host: HostOption = "127.0.0.1", port: PortOption = 8000,
    api_key: ApiKeyOption = None, served_name: ServedNameOption = None,
    config: ConfigOption = None, policy: TunedPolicyOption = None, memory: MemoryOption = "auto",
    disk: DiskOption = "auto", max_running: RunningOption = 8, max_waiting: WaitingOption = 64,
    max_context: ContextOption = None, max_new_tokens: MaxNewTokensOption = 1024,
    library: ShelfOption = None, key: KeyOption = None, sessions: SessionsOption = None,
    max_disk: MaxDiskOption = "8GiB", exact: ExactOption = False,
    adapter: AdapterOption = None, seal: SealOption = None,
    chunk: ChunkOption = 512, max_body: BodyOption = "32MiB", max_images: ImagesOption = 8,
    timeout: TimeoutOption = 3600.0, grace: GraceOption = 30.0, cors_origin: OriginOption = None,
    allow_host: AllowHostOption = None, log_json: LogJsonOption = False,
    replicas: ReplicasOption = 0, max_replicas: MostReplicasOption = None, ray: RayOption = None,
    at_random: AtRandomOption = False,
    check: CheckOption = False, device: DeviceOption = "cpu", dtype: DtypeOption = None,
    weights: WeightsOption = None, revision: RevisionOption = None,
    offline: OfflineOption = False, trust_remote_code: TrustOption = False,
) -> None:  # fmt: skip
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, and a page at /.

    All requests share --memory. All who reach the address can ask: this machine alone, unless
    --host says otherwise. Then --api-key should stand beside it.
    """
    require_server()
    from penstock.server import serving
    from penstock.server.settings import ServerSettings

    if replicas:
        from penstock.cluster.ray_session import require_ray

        require_ray()
    elif ray or max_replicas or at_random:
        raise ConfigError("--ray, --max-replicas and --at-random are for --replicas")
    console = PlainConsole(stderr=True)
    if log_json:
        log_as_json()
    settings = ServerSettings(
        model_name=served_name or Path(model).name or model, api_key=_api_key(api_key),
        cors_origins=tuple(cors_origin or ()), max_model_len=max_context,
        allowed_hosts=serving.hosts_of(host, tuple(allow_host or ())),
        max_body_bytes=parse_bytes(max_body), max_images=max_images,
        max_answer_tokens=max_new_tokens, max_request_s=timeout,
    )  # fmt: skip
    if host not in serving.LOOPBACK and settings.api_key is None:
        console.print(f"note: {host} is open to others, and there is no --api-key", soft_wrap=True)
    served = ServedModel(
        model=model, source=ModelSource(revision, offline, trust_remote_code), device=device,
        dtype=None if dtype is None else dtype.value, weights=weights, config=config,
        policy=policy, memory=memory, disk=disk, exact=exact, adapter=adapter, seal=seal,
        max_context=max_context, max_running=max_running, max_waiting=max_waiting, chunk=chunk,
        documents=library, key=key, max_disk=max_disk,
        sessions=None if sessions is None else in_home(sessions, "--sessions"),
    )  # fmt: skip
    with serving.says_why_it_ends(), serving.bind(host, port) as listening:
        opened = (
            open_front(
                served, settings, count=replicas, most=max_replicas or replicas, address=ray,
                grace_s=grace, at_random=at_random,
            )
            if replicas else open_app(served, settings)
        )  # fmt: skip
        with opened as app:
            if check:
                serving.check(app, listening, settings, say)
                return
            url = serving.url_of(listening)
            console.print(_greeting(settings.model_name, url, app), soft_wrap=True)
            told = serving.serve(app, listening, grace_s=grace)
        kept_too = "" if sessions is None else "; conversations are stored"
        console.print(f"ended by {told}{kept_too}", soft_wrap=True)


def _greeting(model: str, url: str, app: "Application") -> str:
    backend = app.state.backend
    within = ""
    if (engine := getattr(backend, "engine", None)) is None:
        within = f", {backend.count} replicas"
    elif (limit := engine.stats().limit_bytes) is not None:
        within = f", KV caches within {format_bytes(limit)}"
    return f"{model} at {url} (a page), {url}/v1 (OpenAI's clients){within}; Ctrl-C ends it"


def require_server() -> None:
    """Refuse where what the server is built on is not installed.

    Raises:
        ConfigError: says what to install.
    """
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not installed, which the server needs: pip install 'penstock[server]'"
        )


def _api_key(source: str | None) -> str | None:
    """The key that a source holds.

    Raises:
        ConfigError: it is no source, or holds none.
    """
    if source is None:
        return None
    kind, _, place = source.partition(":")
    if kind == "env" and place:
        key = os.environ.get(place, "")
    elif kind == "file" and place:
        try:
            key = Path(place).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError(f"--api-key {source}: cannot read it: {reason}") from error
    else:
        raise ConfigError("--api-key is file:PATH or env:NAME; the key itself would show in ps")
    if not key.strip():
        raise ConfigError(f"--api-key {source} holds no key")
    return key.strip()
