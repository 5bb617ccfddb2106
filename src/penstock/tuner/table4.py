"""KVSwap's Table 4 predicted from presets alone, every cell beside the paper's.

Run: python -m penstock.tuner.table4 [--out FILE]. No cell has a constant of its own. Methods are
as the paper has them: G is 4 on NVMe and 8 on eMMC (section 5.1), sigma is the smallest that fits
(appendix A.4), only KVSwap and InfiniGen*+ru reuse, ShadowKV reads values alone. Two global
constants were settled with the table in view, as no source gives them: what one operation costs the
Orin's host, and that looking up a reuse buffer costs by the unit. A third, what a read costs the
host, was measured elsewhere and added when the table had been seen without it.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from penstock.core.atomic_write import json_kind, require_own, write_atomically
from penstock.core.errors import BudgetError, ConfigError
from penstock.devices.presets import PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.engine.policy import SelectionPolicy
from penstock.methods import POLICIES
from penstock.methods.baselines.shadowkv import ShadowKV
from penstock.methods.kvswap.policy import PAPER_SELECTED_TOKENS, KVSwap
from penstock.tuner.cost_model import Workload, plan_of, predict, predict_work
from penstock.tuner.hardware import hardware
from penstock.tuner.model_sizes import model_sizes
from penstock.tuner.step_work import work_of

_TABLE = Path(__file__).parent / "table4.toml"
TIGHT_INDEXES: Sequence[tuple[int, Literal[8, 4]]] = ((48, 8), (32, 8), (48, 4), (40, 4), (32, 4))
"""Ranks and bits where layers share their slots, which the paper does not say."""
PAPER_GROUPS: Mapping[str, int] = MappingProxyType({"nvme": 4, "emmc": 8})
"""G by disk (KVSwap, section 5.1)."""
RANK_STEP = 16
NO_REUSE = ("infinigen", "infinigen-star", "shadowkv")
JUDGED = ("kvswap", "flexgen")
"""The methods whose cells are to be within `TOLERANCE`."""
TOLERANCE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCell:
    """One cell: tokens/s."""

    disk: str
    policy: str
    context: int
    batch: int
    paper: float
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to the paper's figure as printed."""
        return self.predicted / self.paper - 1

    @property
    def is_hit(self) -> bool:
        """Within the tolerance of the printed figure."""
        return abs(self.error) <= TOLERANCE

    @property
    def is_hit_as_printed(self) -> bool:
        """The same, with the prediction rounded to the one digit that the table prints."""
        return abs(round(self.predicted, 1) / self.paper - 1) <= TOLERANCE


def paper_table() -> dict[str, Any]:
    """The constants of `table4.toml`."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def disks_of_table5() -> dict[str, DeviceProfile]:
    """The presets with the cost of a request that Table 5's runs without reuse imply.

    At batch 8 a layer reads 8 x 400 tokens in groups of G; all of a step is taken to be reads.
    """
    table = paper_table()
    model, batch = model_sizes(table["model"]), 8
    out = {}
    for name, tokens_per_s in table["no_reuse_tokens_per_s"].items():
        preset, group = PRESETS[name], PAPER_GROUPS[name]
        reads = batch * PAPER_SELECTED_TOKENS / group * model.shape.num_layers
        request_s = batch / tokens_per_s / reads
        request_s -= group * model.shape.token_bytes / preset.bandwidth
        page_s = preset.flash_page_bytes / preset.bandwidth
        out[name] = replace(
            preset, iops=1 / (request_s + page_s), source="KVSwap, Table 5 without reuse"
        )
    return out


def predict_table(disks: Mapping[str, DeviceProfile] = PRESETS) -> list[TableCell]:
    """Every cell of the table.

    Args:
        disks: "nvme" and "emmc", as devices.
    """
    table = paper_table()
    cells = []
    for disk, rows in table["rows"].items():
        columns = [(context, batch) for context in table["contexts"] for batch in table["batches"]]
        for name, figures in rows.items():
            for (context, batch), paper in zip(columns, figures, strict=True):
                predicted = _tokens_per_s(table, name, disks[disk], context, batch)
                cells.append(
                    TableCell(
                        disk=disk, policy=name, context=context, batch=batch, paper=paper,
                        predicted=predicted,
                    )
                )  # fmt: skip
    return cells


def _tokens_per_s(
    table: Mapping[str, Any], name: str, disk: DeviceProfile, context: int, batch: int
) -> float:
    model = model_sizes(table["model"])
    full = model.shape.full_cache_bytes(batch, context)
    load = Workload(
        model=model, hardware=hardware(table["hardware"]), disk=disk, context=context, batch=batch,
        limit_bytes=int(full * Fraction(table["memory"])),
    )  # fmt: skip
    if name == "full":
        load = replace(load, limit_bytes=table["vllm_memory_bytes"])
    policy = _paper_policy(name, load)
    if not isinstance(policy, ShadowKV):
        return predict(policy, load).tokens_per_s
    chosen, plan = plan_of(policy, load)
    work = work_of(chosen, plan, model.shape, context=context, reuse_rate=load.reuse_rate)
    values_only = replace(work, request_bytes=work.request_bytes // 2)
    return predict_work(name, plan, values_only, load).tokens_per_s


def _paper_policy(name: str, load: Workload) -> SelectionPolicy:
    if name == KVSwap.name:
        return paper_kvswap(load)
    policy: Any = POLICIES[name]
    made: SelectionPolicy = policy(reuse_tokens=0) if name in NO_REUSE else policy()
    return made


def paper_kvswap(load: Workload) -> KVSwap:
    """KVSwap as appendix A.4 tunes it: 16-bit components, sigma as small as the budget allows
    beside a reuse buffer of one selection; where that has no room, the first of `TIGHT_INDEXES`."""
    joint, group = load.model.shape.joint_dim, PAPER_GROUPS[load.disk.name]
    one_selection = KVSwap(
        group_tokens=group, selected_tokens=PAPER_SELECTED_TOKENS, index_block_tokens=0,
        slot_bits=16,
    )  # fmt: skip
    for rank in range(joint, 0, -RANK_STEP):
        made = replace(one_selection, rank=rank, index_bits=16, reuse_tokens=PAPER_SELECTED_TOKENS)
        try:
            if not plan_of(made, load)[1].shared_pools:
                return made
        except BudgetError:
            continue
    for rank, bits in TIGHT_INDEXES:
        made = replace(one_selection, rank=rank, index_bits=bits)
        with suppress(BudgetError):
            plan_of(made, load)
            return made
    return one_selection


def wrong_orders(cells: Sequence[TableCell]) -> dict[str, list[str]]:
    """Column to the pairs of methods that the prediction has the other way round.

    Pairs that the paper prints alike have no order; every other pair counts, however close.
    """
    columns: dict[str, list[TableCell]] = {}
    for cell in cells:
        key = f"{cell.disk} {cell.context // 1024}K b={cell.batch}"
        columns.setdefault(key, []).append(cell)
    return {
        key: [
            f"{low.policy} < {high.policy}"
            for low in column
            for high in column
            if low.paper < high.paper and low.predicted >= high.predicted
        ]
        for key, column in columns.items()
    }


def summary(cells: Sequence[TableCell]) -> dict[str, Any]:
    """Hits of the judged methods, hits of all by method, and columns whose order is right."""
    orders = wrong_orders(cells)
    judged = [cell for cell in cells if cell.policy in JUDGED]
    names = list(dict.fromkeys((cell.disk, cell.policy) for cell in cells))
    return {
        "judged_cells": len(judged),
        "judged_hits": sum(cell.is_hit for cell in judged),
        "judged_hits_as_printed": sum(cell.is_hit_as_printed for cell in judged),
        "hits": {
            f"{disk} {name}": sum(c.is_hit for c in cells if (c.disk, c.policy) == (disk, name))
            for disk, name in names
        },
        "columns": len(orders),
        "columns_in_order": sum(not wrong for wrong in orders.values()),
        "wrong_orders": {key: wrong for key, wrong in orders.items() if wrong},
    }


def document() -> dict[str, Any]:
    """The result, in the form of the benchmarks': all cells and what they add up to."""
    cells = predict_table()
    return {
        "format": "penstock-result-1",
        "kind": "plan.table4",
        "command": "python -m penstock.tuner.table4 --out PATH",
        "settings": {"tolerance": TOLERANCE, "table": "KVSwap (arXiv 2511.11907), Table 4"},
        "seed": 0,
        "machine": {"predicted": "from presets; nothing was measured"},
        "libraries": {},
        "commit": "",
        "date": "",
        "figures": {
            "summary": summary(cells),
            "summary_with_requests_of_table5": summary(predict_table(disks_of_table5())),
            "cells": [asdict(cell) | {"error": cell.error, "hit": cell.is_hit} for cell in cells],
        },
    }


def text_table(cells: Sequence[TableCell]) -> str:
    """All cells as text: predicted (paper), * where the prediction is out of the tolerance."""
    lines = []
    for disk in dict.fromkeys(cell.disk for cell in cells):
        for context in dict.fromkeys(cell.context for cell in cells):
            rows = [cell for cell in cells if (cell.disk, cell.context) == (disk, context)]
            heads = dict.fromkeys(f"b={cell.batch}" for cell in rows)
            lines.append(
                f"{disk} {context // 1024}K".ljust(22) + "".join(f"{h:>15}" for h in heads)
            )
            for name in dict.fromkeys(cell.policy for cell in rows):
                figures = [
                    f"{c.predicted:.2f} ({c.paper:.1f}){' ' if c.is_hit else '*'}"
                    for c in rows if c.policy == name
                ]  # fmt: skip
                lines.append(name.ljust(22) + "".join(f"{figure:>15}" for figure in figures))
    return "\n".join(lines)


def text_summary(total: Mapping[str, Any]) -> str:
    """What the cells add up to, for people."""
    return (
        f"tokens/s, predicted (paper); * is more than {TOLERANCE:.0%} off\n"
        f"{' and '.join(JUDGED)}: {total['judged_hits']} of {total['judged_cells']} cells within "
        f"{TOLERANCE:.0%} ({total['judged_hits_as_printed']} as printed, to one digit)\n"
        f"order right in {total['columns_in_order']} of {total['columns']} columns"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, say how good it is, and write the document if asked."""
    parser = argparse.ArgumentParser(prog="python -m penstock.tuner.table4", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parsed = parser.parse_args(arguments)
    if parsed.out is not None:
        try:
            require_own(parsed.out, json_kind("result of penstock", "penstock-result-"), "--out")
        except ConfigError as error:
            parser.error(str(error))
    disks: dict[str, Mapping[str, DeviceProfile]] = {
        "presets alone": PRESETS, "requests as Table 5 has them": disks_of_table5(),
    }  # fmt: skip
    for title, devices in disks.items():
        cells = predict_table(devices)
        sys.stdout.write(f"{title}\n{text_table(cells)}\n{text_summary(summary(cells))}\n\n")
    if parsed.out is not None:
        write_atomically(json.dumps(document(), indent=1) + "\n", parsed.out)


if __name__ == "__main__":
    main()
