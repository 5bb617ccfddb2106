"""`penstock doc`: store a long text's KV cache once, and ask it for ever without prefilling it."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from penstock.cli.command import PenstockCommand, TorchCommand
from penstock.cli.console import PlainConsole
from penstock.cli.doc_options import (
    KeyOption,
    LibraryOption,
    NameArgument,
    load_model_of,
    open_shelf,
)
from penstock.cli.doc_shelf import (
    gc_command,
    key_command,
    list_command,
    remove_command,
    show_command,
    verify_command,
)
from penstock.cli.generate import as_document
from penstock.cli.loading import ModelSource, load_model
from penstock.cli.model_options import OfflineOption, RevisionOption, TrustOption
from penstock.cli.options import (
    AdapterOption,
    ChunkOption,
    DeviceOption,
    DtypeOption,
    ExactOption,
    ImageOption,
    JsonOption,
    MaxNewTokensOption,
    MemoryOption,
    MinPOption,
    ModelArgument,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    VerifyOption,
    VideoOption,
    WeightsOption,
    memory_option,
    sampling_params,
)
from penstock.cli.process_sizes import ProcessSizes
from penstock.cli.prompts import read_stdin, with_pictures
from penstock.core.byte_size import format_bytes, parse_bytes
from penstock.core.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from penstock.generation.output import RequestOutput
    from penstock.models.loader import LoadedModel

doc_app = typer.Typer(
    name="doc", no_args_is_help=True, rich_markup_mode=None,
    help="Store a long text's KV cache with its index, and ask it without prefilling it again.",
)  # fmt: skip

_STDIN = "-"
DiskOption = Annotated[
    str,
    typer.Option(
        metavar="PATH|nvme|ufs|emmc|memory|auto",
        help="Where a cache keeps its own new tokens; a simulated device slows down the document.",
    ),
]


QuestionsArgument = Annotated[
    list[str], typer.Argument(metavar="QUESTION", help="Each is asked behind the same text.")
]


def add_command(
    model: ModelArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A UTF-8 text; - is stdin.")],
    name: Annotated[str, typer.Option(help="What it is called from now on.")],
    image: ImageOption = None,
    video: VideoOption = None,
    title: Annotated[str, typer.Option(help="What it is, in a few words.")] = "",
    policy: Annotated[str, typer.Option(help="Whose index is stored.")] = "kvswap",
    memory: MemoryOption = "auto",
    library: LibraryOption = None,
    key: KeyOption = None,
    max_disk: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="Room for the whole library, kept for later commands: 20GiB; "
            "none for no limit. What was asked least recently goes.",
        ),
    ] = None,
    max_writes: Annotated[
        str | None,
        typer.Option(
            "--max-writes-per-day", metavar="BYTES",
            help="Bytes written to the library on a day (UTC), kept for later commands.",
        ),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Prefill all of it, also what another one begins with.")
    ] = False,
    adapter: AdapterOption = None,
    chunk: ChunkOption = 1024,
    disk: DiskOption = "auto",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    trust_remote_code: TrustOption = False,
) -> None:  # fmt: skip
    """Prefill a text and store it under a name."""
    from penstock.cli.doc_screen import AddProgress

    console = PlainConsole(stderr=True)
    shelf = open_shelf(library, key, disk=disk, adapter=adapter, prefill_chunk_size=chunk)
    shelf.require_free(name)
    limits = _limits_of(max_disk, max_writes)
    text = _read_text(file)
    source = ModelSource(revision, offline, trust_remote_code)
    loaded = load_model(console, model, dtype=dtype, weights=weights, device=device, source=source)
    if limits:
        shelf.documents.set_limits(shelf.documents.settings._replace(**limits))
    text = with_pictures(loaded, text, image or (), video or ())
    with _told_removed(console) as on_removed, AddProgress(console) as progress:
        added = shelf.add(
            loaded, text, name, policy=policy, memory=memory,
            title=title or ("" if str(file) == _STDIN else file.name), shares=not alone,
            on_tokens=progress.on_tokens, on_bytes=progress.on_bytes, on_removed=on_removed,
        )  # fmt: skip
    with added.document as document:
        shared = ""
        if added.shared_tokens:
            shared = f", {added.shared_tokens:,} of them taken over from {added.shared_with}"
        console.print(
            f"{name}: {document.about.tokens:,} tokens{shared}; "
            f"{format_bytes(document.written_bytes)} written\n"
            f'ask it: penstock doc ask {name} "..."',
            markup=False, soft_wrap=True,
        )  # fmt: skip


def ask_command(
    name: NameArgument,
    questions: QuestionsArgument,
    image: ImageOption = None, video: VideoOption = None,
    model: Annotated[
        str | None, typer.Option(help="The model, if it is not where it was when it was added.")
    ] = None,
    memory: Annotated[
        str,
        memory_option(
            "SIZE|SHARE|auto|stored",
            "Bounds the KV cache, not the weights; stored: as when the document was added.",
        ),
    ] = "stored",
    policy: Annotated[
        str | None, typer.Option(help="Another policy than its own: reads all of the text first.")
    ] = None,
    max_new_tokens: MaxNewTokensOption = 128, exact: ExactOption = False,
    verify: VerifyOption = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Append questions and answers to the document: a chat.")
    ] = False,
    library: LibraryOption = None, key: KeyOption = None, temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0, top_k: TopKOption = 0, min_p: MinPOption = 0.0,
    seed: SeedOption = None, stop: StopOption = None, adapter: AdapterOption = None,
    chunk: ChunkOption = 1024, disk: DiskOption = "auto", device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    revision: RevisionOption = None, offline: OfflineOption = False,
    trust_remote_code: TrustOption = False, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Answer questions about a stored text, without prefilling it.

    Answers go to stdout, everything else to stderr.
    """
    from penstock.cli.doc_screen import AnswersScreen, RepairProgress
    from penstock.cli.screen import show_report

    console = PlainConsole(stderr=True)
    _require_one(questions, image, video)
    params = sampling_params(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    shelf = open_shelf(library, key, disk=disk, adapter=adapter, prefill_chunk_size=chunk)
    source = ModelSource(revision, offline, trust_remote_code)
    called, loaded = load_model_of(
        shelf, name, model, console, device=device, dtype=dtype, weights=weights, source=source
    )
    asked = [with_pictures(loaded, each, image or (), video or ()) for each in questions]
    with (
        _collected(called, loaded if as_json else None) as outputs,
        shelf.open(name, loaded) as document,
    ):
        document.questions_of(asked, params, keep=keep)  # before somebody has to go
        if keep:
            with _told_removed(console) as on_removed:
                shelf.require_room(name, len(questions) * max_new_tokens, on_removed)
        with (
            RepairProgress(console) as repair,
            AnswersScreen(console, None if as_json else sys.stdout, questions) as screen,
        ):
            document.ask(
                asked, params, on_text=screen.on_text, on_tokens=repair.update,
                on_answer=outputs.append, keep=keep, memory=memory, policy=policy, exact=exact,
                verify=verify,
            )  # fmt: skip
    if not as_json:
        show_report(console, outputs[-1].run, ProcessSizes.of(loaded.model))


@contextmanager
def _told_removed(console: Console) -> Iterator[Callable[[str], None]]:
    """Takes the names of documents that had to go, and says them at the end, whatever came."""
    removed: list[str] = []
    try:
        yield removed.append
    finally:
        for gone in removed:
            console.print(f"removed {gone}, to make room", markup=False, soft_wrap=True)


@contextmanager
def _collected(model: str, loaded: "LoadedModel | None") -> Iterator["list[RequestOutput]"]:
    """Takes answers, and prints those that were done at the end, whatever came.

    Args:
        model: what it is called in the JSON document.
        loaded: the same model; None: nothing is printed.
    """
    outputs: list[RequestOutput] = []
    try:
        yield outputs
    finally:
        if loaded is not None and outputs:
            sizes = ProcessSizes.of(loaded.model)
            typer.echo(json.dumps([_as_json(model, output, sizes) for output in outputs]))


def _as_json(model: str, output: "RequestOutput", sizes: ProcessSizes) -> dict[str, object]:
    return {
        **as_document(model, output, sizes),
        "question": output.prompt,
        "restored_tokens": output.run.restored_tokens,
        "recomputed_tokens": output.run.recomputed_tokens,
    }


def _require_one(questions: list[str], *pictures: list[Path] | None) -> None:
    """Refuse pictures for several questions.

    Raises:
        ConfigError: there are both.
    """
    if any(pictures) and len(questions) > 1:
        raise ConfigError("--image and --video go with one question; ask the others by themselves")


def _read_text(file: Path) -> str:
    from penstock.generation.prompts import read_text_file

    text = read_stdin("the text") if str(file) == _STDIN else read_text_file(file, "the text")
    if not text.strip():
        raise PromptError(f"the text {'on stdin' if str(file) == _STDIN else file} is empty")
    return text


def _limits_of(max_disk: str | None, max_writes: str | None) -> dict[str, int | None]:
    """The limits that were given, by the name of their setting."""
    given = {
        "max_disk_bytes": ("--max-disk", max_disk),
        "writes_per_day_bytes": ("--max-writes-per-day", max_writes),
    }
    limits: dict[str, int | None] = {}
    for name, (option, said) in given.items():
        if said is None:
            continue
        limits[name] = None if said.strip().lower() == "none" else parse_bytes(said)
        if limits[name] == 0:
            raise ConfigError(f"{option} {said} leaves no room; give 1 byte or more, or none")
    return limits


doc_app.command("add", cls=TorchCommand)(add_command)
doc_app.command("ask", cls=TorchCommand)(ask_command)
doc_app.command("ls", cls=PenstockCommand)(list_command)
doc_app.command("show", cls=PenstockCommand)(show_command)
doc_app.command("verify", cls=TorchCommand)(verify_command)
doc_app.command("rm", cls=PenstockCommand)(remove_command)
doc_app.command("gc", cls=PenstockCommand)(gc_command)
doc_app.command("key", cls=PenstockCommand)(key_command)
