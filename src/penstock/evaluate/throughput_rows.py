"""The rows of the throughput table: what runs, on which device, with which budget."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.evaluate.accuracy_settings import Setting
from penstock.methods import FlexGen, Full, KVSwap, SelectionPolicy
from penstock.models.plain_model import PlainKind
from penstock.workloads.selection_streams import (
    PAPER_OVERLAP,
    OverlapStream,
    SelectionStream,
    streamed,
)

FLOOR_TOKENS = 400
FLOORS = ("floor, DynamicCache", "floor, StaticCache")
STATIC, FULL, RESIDENT = "StaticCache", "full", "kvswap, all resident"
KVSWAP, NO_REUSE, FLEXGEN = "kvswap", "kvswap, no reuse", "flexgen"
OVERLAP = f"kvswap, {PAPER_OVERLAP:.0%} overlap".replace("%", " %")
GROUPS_OF_8, OVERLAP_OF_8 = "kvswap, G=8", f"{OVERLAP}, G=8"
REAL = "real"

Budget = Literal["none", "given"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way of decoding. Either a plain cache of transformers or a policy of ours."""

    name: str
    plain: PlainKind | None = None
    is_floor: bool = False
    """Only `FLOOR_TOKENS` tokens of context."""
    policy: SelectionPolicy | None = None
    budget: Budget = "given"
    device: str = REAL
    """"real", or the preset that is simulated."""
    stream: str = "own"
    """Where its selections come from, see `SelectionStream.describe`."""
    synthetic_stream: bool = False
    """Selections are drawn with a stated overlap instead of by score alone."""

    @property
    def on_disk(self) -> bool:
        """Whether the document lies in a store."""
        return self.policy is not None and not self.policy.stays_resident

    @property
    def is_resident(self) -> bool:
        """Whether all of the document's KV is kept in fast memory."""
        return not self.is_floor and (self.plain is not None or self.budget == "none")

    @property
    def is_simulated(self) -> bool:
        """Whether the storage device is simulated."""
        return self.device != REAL


def on_device(name: str, device: str) -> str:
    """A row's name on a storage device."""
    return name if device == REAL else f"{name} ({device}, simulated)"


def with_stream(row: Row, stream: SelectionStream | None) -> Row:
    """The same row with its selections from a stream, if its policy selects under a budget and has
    no stream yet; otherwise the row as it is."""
    if stream is None or row.policy is None or row.is_resident or row.stream != "own":
        return row
    policy = streamed(row.policy, stream)
    if policy is row.policy:
        return row
    return replace(
        row, policy=policy, stream=stream.describe(),
        synthetic_stream=isinstance(stream, OverlapStream),
    )  # fmt: skip


def all_rows(
    devices: Iterable[str], methods: Sequence[Setting] = (),
    stream: SelectionStream | None = None,
) -> list[Row]:  # fmt: skip
    """Every row, floors first; those of the first device come before those of the next.

    Args:
        methods: further policies, each a row on every device. Their budget is the run's.
        stream: where all selections come from, but for rows that are of a stream anyway; None: from
            each policy's own scores.
    """
    overlap = OverlapStream()
    floors = [
        Row(name=FLOORS[0], plain="dynamic", is_floor=True),
        Row(name=FLOORS[1], plain="static", is_floor=True),
    ]
    resident = [
        Row(name=STATIC, plain="static"),
        Row(name=FULL, policy=Full(), budget="none"),
        Row(name=RESIDENT, policy=KVSwap(), budget="none"),
    ]
    rows = [*floors, *resident]
    for device in devices:
        rows += [
            Row(name=on_device(KVSWAP, device), policy=KVSwap(), device=device),
            Row(name=on_device(NO_REUSE, device), policy=KVSwap(reuse_tokens=0), device=device),
            with_stream(
                Row(name=on_device(OVERLAP, device), policy=KVSwap(), device=device), overlap
            ),
            Row(name=on_device(GROUPS_OF_8, device), policy=KVSwap(group_tokens=8), device=device),
            with_stream(
                Row(
                    name=on_device(OVERLAP_OF_8, device), policy=KVSwap(group_tokens=8),
                    device=device,
                ),
                overlap,
            ),
            Row(name=on_device(FLEXGEN, device), policy=FlexGen(), device=device),
        ]  # fmt: skip
        rows += [
            Row(name=on_device(method.text, device), policy=method.policy, device=device)
            for method in methods
        ]
    return [with_stream(row, stream) for row in rows]


def chosen_rows(rows: list[Row], names: list[str] | None) -> list[Row]:
    """The rows asked for, floors always among them; a name chooses all rows that begin with it.

    Raises:
        ConfigError: a name fits no row.
    """
    if not names:
        return rows
    for name in names:
        if not any(row.name.startswith(name) for row in rows):
            known = "; ".join(row.name for row in rows)
            raise ConfigError(f"no row is called {name!r}; there are: {known}")
    return [row for row in rows if row.is_floor or row.name.startswith(tuple(names))]
