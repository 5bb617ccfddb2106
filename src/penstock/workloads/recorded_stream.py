"""RecordedStream: selections that a policy made on a real model, played on another context.

Source: none; how a recording is scaled is said in `RecordedStream`.
"""

import io
import json
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from penstock.core.atomic_write import FileKind, write_atomically
from penstock.core.errors import ConfigError, StorageError
from penstock.core.regular_file import open_regular
from penstock.core.selection import Selection
from penstock.engine.policy import IndexRequest, ceil_div
from penstock.workloads.selection_streams import (
    NOTHING,
    LayerStream,
    SelectionStream,
    Step,
    as_selection,
    first_of_row,
    own_others,
    units_of,
)

FORMAT = "penstock-selections-1"
_SPREAD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """What one policy selected in some decode steps of one model."""

    shares: NDArray[np.float32]
    """Place of each selected unit's first token as a share of the context; 1 and above: generated
    tokens; NaN where a row selected fewer. [steps, layers, rows, wanted]"""
    context: int
    """Tokens before the first step."""
    group_tokens: int
    """Tokens of a unit."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where it comes from: model, policy, task, tokens, seed."""

    @property
    def first_tokens(self) -> NDArray[np.int64]:
        """First token of each selected unit, `NOTHING` where there is none. Shape of `shares`."""
        return np.nan_to_num(np.rint(self.shares * self.context), nan=NOTHING).astype(np.int64)

    def overlaps(self) -> NDArray[np.float64]:
        """Of each step's units the share that the step before had. [steps - 1, layers, rows]"""
        units = self.first_tokens
        steps, layers, rows, _ = units.shape
        out = np.full((max(0, steps - 1), layers, rows), np.nan)
        for place in np.ndindex(*out.shape):
            step, layer, row = place
            now = units[step + 1, layer, row]
            before = units[step, layer, row]
            now, before = now[now != NOTHING], before[before != NOTHING]
            if len(now) and len(before):
                out[place] = np.isin(now, before).mean()
        return out

    def statistics(self) -> dict[str, Any]:
        """True overlaps: the mean, its spread over steps, and each layer's; plain data."""
        overlaps = self.overlaps()
        if np.isnan(overlaps).all():
            return {"mean": None, "p10": None, "p90": None, "by_layer": []}
        mean, low, high = np.nanmean(overlaps), *np.nanpercentile(overlaps, [10, 90])
        layers = [overlaps[:, layer] for layer in range(overlaps.shape[1])]
        by_layer = [None if np.isnan(o).all() else float(np.nanmean(o)) for o in layers]
        return {"mean": float(mean), "p10": float(low), "p90": float(high), "by_layer": by_layer}

    def save(self, path: str | Path) -> None:
        """Write the shares and, as JSON beside them, everything else (.npz).

        Raises:
            StorageError: the file cannot be written.
        """
        about = {
            "format": FORMAT, "context": self.context, "group_tokens": self.group_tokens,
            "source": self.source, "overlap": self.statistics(),
        }  # fmt: skip
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            packed = io.BytesIO()
            np.savez_compressed(packed, shares=self.shares, about=np.array(json.dumps(about)))
            write_atomically(packed.getvalue(), Path(path))
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Recording":
        """Read a recording.

        Raises:
            ConfigError: the file is missing or not one of ours.
        """
        try:
            with open_regular(path) as file, np.load(file, allow_pickle=False) as content:
                about = json.loads(str(content["about"]))
                shares = content["shares"].astype(np.float32)
            found = None
            if about["format"] == FORMAT and shares.ndim == 4 and np.isfinite(shares).any():
                found = cls(
                    shares=shares, context=int(about["context"]),
                    group_tokens=int(about["group_tokens"]), source=dict(about["source"]),
                )  # fmt: skip
        except (
            OSError, ValueError, KeyError, EOFError, AttributeError, TypeError, RuntimeError,
            OverflowError, MemoryError, RecursionError, zipfile.BadZipFile, zlib.error, TokenError,
        ) as error:  # fmt: skip
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot read the recorded selections {path}: {reason}; make them with penstock "
                "bench record"
            ) from error
        if found is None or min(found.context, found.group_tokens) < 1:
            raise ConfigError(f"{path} holds no recorded selections of penstock bench record")
        return found


def _is_recording(file: BinaryIO) -> bool:
    with np.load(file, allow_pickle=False) as content:
        return bool(json.loads(str(content["about"]))["format"] == FORMAT)


RECORDING = FileKind("recording of penstock bench record", _is_recording)


# Recording --------------------------------------------------------------------------------------


class Recorder(SelectionStream):
    """Leaves the selections of one cache as they are and takes them down."""

    replaces = False

    def __init__(self) -> None:
        self._layers: dict[int, _RecordedLayer] = {}

    @override
    def layer_stream(self, layer: int, request: IndexRequest) -> LayerStream:
        self._layers[layer] = _RecordedLayer(request.group_tokens)
        return self._layers[layer]

    @override
    def describe(self) -> str:
        return "own, recorded"

    @property
    def has_selections(self) -> bool:
        """Whether anything was selected."""
        return any(layer.units for layer in self._layers.values())

    def recording(self, source: dict[str, Any]) -> Recording:
        """All that was selected.

        Raises:
            ConfigError: nothing was selected.
        """
        layers = [self._layers[layer] for layer in sorted(self._layers)]
        steps = [len(layer.units) for layer in layers]
        if not self.has_selections:
            raise ConfigError(
                "the policy selected nothing: it attends to everything, or its budget holds the "
                "whole context; give it less memory or more tokens"
            )
        first = layers[int(np.argmax(steps))]
        rows = len(first.units[0])
        width = max(units.shape[1] for layer in layers for units in layer.units)
        shares = np.full((max(steps), len(layers), rows, width), np.nan, dtype=np.float32)
        for number, layer in enumerate(layers):
            for step, units in enumerate(layer.units):
                places = units * layer.group_tokens / first.context
                places[units == NOTHING] = np.nan
                shares[step, number, :, : units.shape[1]] = places
        return Recording(
            shares=shares, context=first.context, group_tokens=first.group_tokens, source=source
        )


class _RecordedLayer(LayerStream):
    """The selections of one layer, a step after the other."""

    def __init__(self, group_tokens: int) -> None:
        self.group_tokens = group_tokens
        self.context = 0
        """Tokens that were closed before the first step."""
        self.units: list[NDArray[np.int64]] = []
        """[rows, wanted] of each step."""

    @override
    def choose(self, step: Step) -> Selection:
        """The method's own selection."""
        selection = step.own(step.wanted, None)
        self.units.append(units_of(selection))
        return selection

    @override
    def note_closed(self, first_token: int, end_token: int) -> None:
        if first_token == 0:
            self.units.clear()
        if not self.units:
            self.context = end_token

    @override
    def take_rows_from(self, other: LayerStream, rows: NDArray[np.int64]) -> None:
        """What was recorded stays."""


# Playing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecordedStream(SelectionStream):
    """Plays a recording on a model and a context of any size.

    How it is scaled:
        - Places. A unit keeps its share of the context: what began at 30 % of 8K tokens begins at
          30 % of 32K. Generated tokens keep their distance from the prompt's end. A unit keeps its
          size in tokens, so that a selection stays as large as it was, and spreads out.
        - Units of another size. Larger ones are those that the recorded units begin in; smaller
          ones are as many as cover the recorded tokens.
        - Number. Of too many, those go whose places are the least in a fixed random order, the same
          ones at every step, so that the overlap between steps stays. What is missing are the
          method's own best of all others.
        - Layers by their share of the depth; row r plays row r modulo the recorded ones.
        - Steps there and back again, without end, so that all neighbours were neighbours.
    """

    recording: Recording

    @override
    def layer_stream(self, layer: int, request: IndexRequest) -> LayerStream:
        layers = self.recording.shares.shape[1]
        return _PlayedLayer(
            self.recording, layer * layers // request.shape.num_layers, request.group_tokens
        )

    @override
    def describe(self) -> str:
        source, mean = self.recording.source, self.recording.statistics()["mean"]
        words = [str(source[key]) for key in ("model", "policy", "task") if key in source]
        overlap = "" if mean is None else f", {100 * mean:.0f} % overlap"
        return f"recorded ({', '.join(words)}, {self.recording.context} tokens{overlap})"


class _PlayedLayer(LayerStream):
    """One layer's recorded units, scaled when the first step says how long the context is."""

    def __init__(self, recording: Recording, layer: int, group_tokens: int) -> None:
        self._recording = recording
        self._first_tokens = recording.first_tokens[:, layer]
        self._group_tokens = group_tokens
        self._context = self._next = 0
        self._units: NDArray[np.int64] | None = None
        """Scaled, the preferred ones first. [steps, rows, candidates]"""

    @override
    def choose(self, step: Step) -> Selection:
        if self._units is None:
            self._units = scaled_units(
                self._first_tokens, self._recording.context, self._recording.group_tokens,
                context=self._context, group_tokens=self._group_tokens,
            )  # fmt: skip
        steps, recorded_rows, _ = self._units.shape
        there_and_back = self._next % max(1, 2 * (steps - 1))
        self._next += 1
        units = self._units[min(there_and_back, 2 * (steps - 1) - there_and_back)]
        units = units[np.arange(len(step.first_unit)) % recorded_rows]
        played = units[:, : step.wanted]
        if played.shape[1] == step.wanted and step.may_choose(played):
            step.own(1, None)  # for what it costs
            return as_selection(played)[1]
        wanted = step.wanted_of_row
        played = first_of_row(step.within(units), wanted)
        missing = wanted - (played != NOTHING).sum(axis=1)
        filled = first_of_row(own_others(step, played, int(missing.max())), missing)
        return as_selection(np.concatenate([played, filled], axis=1))[1]

    @override
    def note_closed(self, first_token: int, end_token: int) -> None:
        if first_token == 0:
            self._next, self._units = 0, None
        if self._units is None:
            self._context = end_token

    @override
    def take_rows_from(self, other: LayerStream, rows: NDArray[np.int64]) -> None:
        """Rows play what is theirs by number."""
        assert isinstance(other, _PlayedLayer)
        self._context, self._next, self._units = other._context, other._next, other._units


def scaled_units(
    first_tokens: NDArray[np.int64], recorded_context: int, recorded_group_tokens: int, *,
    context: int, group_tokens: int,
) -> NDArray[np.int64]:  # fmt: skip
    """Recorded places as units of another context; see `RecordedStream`.

    Args:
        first_tokens: of the recorded units, `NOTHING` for none. [steps, rows, wanted]
        context: tokens before the first step here.
        group_tokens: of a unit here.

    Returns:
        Without repeats, the preferred ones first, `NOTHING` at the end. [steps, rows, candidates]
    """
    order = np.argsort(first_tokens.astype(np.uint64) * np.uint64(_SPREAD), axis=-1, kind="stable")
    places = np.take_along_axis(first_tokens, order, axis=-1)
    in_prompt = places * context // recorded_context
    moved = np.where(places < recorded_context, in_prompt, context + places - recorded_context)
    covered = np.arange(ceil_div(recorded_group_tokens, group_tokens))
    units = (moved // group_tokens)[..., None] + covered
    units = np.where(places[..., None] == NOTHING, NOTHING, units)
    units = units.reshape(*first_tokens.shape[:2], -1)
    out = np.full_like(units, NOTHING)
    for place in np.ndindex(*units.shape[:2]):
        row = units[place]
        row = row[row != NOTHING]
        once = row[np.sort(np.unique(row, return_index=True)[1])]
        out[place][: len(once)] = once
    return out
