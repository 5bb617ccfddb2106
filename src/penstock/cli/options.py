"""Options that several commands share: one name and one meaning for one thing."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.byte_size import parse_memory
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.generation.sampling import SamplingParams

POLICY_NAMES = (
    "kvswap", "full", "flexgen", "shadowkv", "loki", "infinigen-star-reuse", "infinigen-star",
    "infinigen", "quest", "arkvale", "pqcache", "clusterkv", "leoam", "louiskv", "dynakv",
    "hillinfer", "snapkv", "h2o", "raas", "streaming_llm",
)  # fmt: skip
"""What a shell completes `--policy` to; the table itself would import torch."""
_ANY_BYTES = 1 << 40
DISK_NAMES = ("auto", "nvme", "ufs", "emmc", "memory", "host")
"""What a shell completes `--disk` to, beside folders."""


class Dtype(StrEnum):
    """What `--dtype` takes."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Weights(StrEnum):
    """What `--weights` takes."""

    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Of a weight in the decoder's layers."""
        return int(self.value.removeprefix("int"))


def _policies() -> list[str]:
    return list(POLICY_NAMES)


def _disks() -> list[str]:
    return list(DISK_NAMES)


def check_memory(memory: str) -> str:
    """Refuse a budget that cannot be, before a model is loaded for it.

    Raises:
        ConfigError: says what to write.
    """
    if memory != "stored":
        parse_memory(memory, _ANY_BYTES, _ANY_BYTES)
    return memory


def sampling_params(
    *, stop: Sequence[str] | None, max_new_tokens: int, ignore_end: bool = False, **settings: Any
) -> "SamplingParams":
    """Sampling settings out of options of these names.

    Raises:
        ConfigError: one is out of its range.
    """
    from penstock.generation.sampling import SamplingParams

    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} must be at least 1")
    return SamplingParams(
        max_tokens=max_new_tokens, stop=tuple(map(unescaped, stop or ())), ignore_eos=ignore_end,
        **settings,
    )  # fmt: skip


def memory_option(metavar: str, about: str) -> Any:
    """A `--memory`, for `Annotated`."""
    return typer.Option(metavar=metavar, help=about, callback=check_memory)


def unescaped(text: str) -> str:
    r"""Text as it was meant, from a shell that passes on `\n` and `\t` as two characters."""
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


# The model and where it computes --------------------------------------------------------------

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, OWNER/NAME on the Hugging Face hub, or recall for the bundled model.",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Where the model computes: cpu or cuda.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Type of weights and cache; as stored when left out.")
]
WeightsOption = Annotated[
    Weights | None,
    typer.Option(
        help="Pack the weights into 8 or 4 bits while they are read (CPU), and keep them in the "
        "user's cache; as stored when left out."
    ),
]

# The KV cache ---------------------------------------------------------------------------------

PolicyOption = Annotated[
    str,
    typer.Option(help="Which past tokens a step attends to.", autocompletion=_policies),
]
TunedPolicyOption = Annotated[
    str | None,
    typer.Option(
        help="Which past tokens a step attends to; auto is what the config picks.",
        show_default="kvswap, or auto with --config", autocompletion=_policies,
    ),
]  # fmt: skip
MemoryOption = Annotated[
    str,
    memory_option(
        "SIZE|SHARE|auto",
        "Bounds the KV cache, not the weights: 2GiB, 1/13 or 5% of the full cache, or auto "
        "(half of the free memory, at most the full cache).",
    ),
]
DiskOption = Annotated[
    str,
    typer.Option(
        metavar="PATH|nvme|ufs|emmc|memory|host|auto",
        help="Where the KV cache lies: a folder, a simulated device, memory, memory that a GPU "
        "reads by itself (host), or the temporary folder.",
        autocompletion=_disks,
    ),
]
ExactOption = Annotated[
    bool, typer.Option("--exact", help="Attend to the whole past: the plain model's tokens.")
]
VerifyOption = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Draft so many under the policy and check them exactly: the plain model's tokens.",
        min=1,
    ),
]  # fmt: skip
AdapterOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|none",
        help="Made by penstock calibrate; default: the one that it made for this model, or that "
        "came with it; none: the index is made from the prompt's own keys.",
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
DevicesOption = Annotated[
    str | None,
    typer.Option(
        metavar="tcp://HOST:PORT,...|ray:N",
        help="Near-storage devices on other hosts, or on N disks of a Ray cluster, for --policy "
        "hillinfer.",
    ),
]
DeviceKeyOption = Annotated[
    str | None,
    typer.Option("--device-key-file", metavar="FILE", help="The key that --devices have too."),
]
DeviceCopiesOption = Annotated[
    int,
    typer.Option(
        "--device-copies", metavar="1|2",
        help="Hosts of --devices that have each token; with 2 the answer goes on without a host.",
    ),
]  # fmt: skip
DeviceTlsOption = Annotated[
    str | None,
    typer.Option(
        "--device-tls", metavar="FILE|sha256:HEX",
        help="Encrypt by TLS, and trust --devices that show a certificate of the file (PEM; their "
        "own, or who signed it), or the one with this fingerprint.",
    ),
]  # fmt: skip
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--device-memory", metavar="SIZE",
        help="Bounds what each near-storage device holds itself; with --policy hillinfer.",
        show_default="no bound",
    ),
]  # fmt: skip
ChunkOption = Annotated[
    int, typer.Option("--chunk", metavar="TOKENS", help="Prompt tokens per forward pass.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Made by penstock tune: gives policy, memory and disk where they are auto or left "
        "out.",
    ),
]

# The prompt and the answer --------------------------------------------------------------------

PromptOption = Annotated[str | None, typer.Option(help="The prompt itself.")]
PromptFileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A UTF-8 file with the prompt; - is stdin.")
]
MessagesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A conversation as JSON, [{role, content}, ...], for the chat template; - is stdin.",
    ),
]
SystemOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="A system message in front of the prompt.")
]
ImageOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", metavar="FILE", help="A picture, in front of the text; repeatable.",
    ),
]  # fmt: skip
VideoOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--video", metavar="FILE|DIR",
        help="A video file, or a folder of its frames, in front of the text; repeatable.",
    ),
]  # fmt: skip
RawOption = Annotated[
    bool, typer.Option("--raw", help="Give the model the plain text, without its chat template.")
]
MaxNewTokensOption = Annotated[
    int, typer.Option(metavar="TOKENS", help="Longest answer, in tokens.")
]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option(help="Sample among tokens of this share of the mass.")]
TopKOption = Annotated[int, typer.Option(help="Sample among so many tokens; 0 is all.")]
MinPOption = Annotated[
    float,
    typer.Option(help="Sample among tokens at least this share as probable as the best one."),
]
RepetitionOption = Annotated[
    float,
    typer.Option(
        "--repetition-penalty", help="Above 1, tokens of prompt and answer come less often again."
    ),
]
AnswersOption = Annotated[
    int, typer.Option("--n", help="Answers to the prompt, which is read once; needs sampling.")
]
IgnoreEndOption = Annotated[bool, typer.Option("--ignore-end", help="Go on behind the end token.")]
SeedOption = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
StopOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help=r"Ends an answer, such as '\n\n'; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
TraceOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a Chrome trace of compute and I/O."),
]
