"""`make snapshot`: what every policy does at fixed seeds, for comparing before and after a change.

    python tests/snapshot.py write FILE [--device cuda]
    python tests/snapshot.py compare FILE [--device cuda]

A case is a tiny model, a policy with its options and a store. Of each the file has the tokens, the
selections of every step and layer, the counters and the ledger. Seconds are left out, and nothing
else depends on time: HillInfer's hot pool has a fixed size here, since it follows measured rates
otherwise. Bytes on a disk depend on its sectors, and sums on the processor: compare on the machine
that wrote the file. Steps that a CUDA graph replays tell no selections; their cases have the rest.
"""

import argparse
import fnmatch
import hashlib
import inspect
import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from penstock import (
    POLICIES,
    BeamSearcher,
    BudgetError,
    PenstockError,
    SearchMemory,
    SearchParams,
    SelectionPolicy,
    TieredCache,
)
from penstock.testing.tiny_models import VOCABULARY, tiny_model

FORMAT = "penstock-snapshot-1"
FAMILIES = ("llama", "qwen3", "gemma3")
PROMPT_TOKENS, NEW_TOKENS, MAX_TOKENS, PADDING = 200, 32, 240, 21
AMPLE_BYTES, BEAM_BYTES = 600_000, 240_000
"""Of a row: room for slots in every layer and any index. Of a search: for few beams at once."""
IN_THE_CLEAR, SHOWN = 6, 3
"""Units of a row that stand beside a digest; differences of a field that are listed."""
Record = dict[str, Any]
Note = Callable[[int, str, list[list[int]]], None]
"""Told a layer, what it is told of, and a list for each row."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    family: str
    policy: str
    """Of `POLICIES`; "beams" for a search."""
    store: str = "memory"
    """"memory", "host", or "disk" for a temporary folder."""
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    """The second one is padded."""
    exact: bool = False
    tight: bool = False
    """The least memory that will do: layers share slots."""
    graphs: bool = False
    """Let CUDA graphs replay the steps."""

    @property
    def name(self) -> str:
        """The key in the file."""
        marks = [f"{key}={value}" for key, value in self.options.items()]
        marks += [f"rows={self.rows}"] * (self.policy != "beams")
        marks += [word for word in ("exact", "tight", "graphs") if getattr(self, word)]
        return f"{self.family}/{self.policy}/{self.store}/{','.join(marks)}"


VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "kvswap": (
        {"reuse_tokens": 0}, {"reuse_tokens": 96}, {"reuse_tokens": 96, "attend": "selected"},
        {"predict": False}, {"rank": 16, "index_bits": 4, "head_reduction": "sum"},
    ),
    "louiskv": (
        {"predict": True}, {"boundaries": "every"}, {"boundaries": "stride:4", "tau": 0.95},
        {"units": "pages"}, {"summary": "mean+spread", "nearness": "cosine"},
        {"beside": True, "block_tokens": 64}, {"beside": False}, {"full_layers": 1},
    ),
    "dynakv": (
        {"virtual": True}, {"representatives": "flash"}, {"representatives": "memory"},
        {"layout": "tokens"}, {"update": "static"}, {"update": "local", "layout": "tokens"},
        {"tokens_per_cluster": 1, "layout": "tokens"}, {"reuse_tokens": 0}, {"reuse_tokens": 96},
    ),
    "hillinfer": (
        {"near": True}, {"near": True, "devices": 2}, {"attend": "hot"}, {"rule": "products"},
        {"bits": 4, "placement": "pin"}, {"placement": "table"}, {"placement": "naive"},
    ),
    "quest": ({"predict": True}, {"full_layers": 1}, {"reuse_tokens": 96}, {"reuse_tokens": 0}),
    "arkvale": ({"predict": True}, {"reuse_tokens": 96}),
    "shadowkv": ({"reuse_tokens": 0}, {"reuse_tokens": 96}),
    "infinigen": ({"predict": False},),
    "infinigen-star-reuse": ({"reuse_tokens": 96},),
    "leoam": ({"reuse_tokens": 0},),
}  # fmt: skip
"""Options beside the plain case of a policy, where they change its way to a read."""
NOT_ON_HOST = {("reuse_tokens", 0), ("units", "pages")}
"""Options that the device tier has not got."""
EVERYWHERE = ("kvswap", "louiskv", "dynakv", "hillinfer")
"""Policies whose way to a disk is followed in every family."""
STRATEGIES = ("scheduled", "layerwise", "resident")


def cases(device: str = "cpu") -> list[Case]:
    """All of them, in the order of the file."""
    found = [Case(family=f, policy=name, tight=f == "llama") for f in FAMILIES for name in POLICIES]
    for family in FAMILIES:
        disk = POLICIES if family == "llama" else EVERYWHERE
        found += [Case(family=family, policy=name, store="disk", rows=1) for name in disk]
        hosts = [name for name, policy in POLICIES.items() if policy.device_tier]
        found += [Case(family=family, policy=name, store="host") for name in hosts]
        found += [
            Case(family=family, policy="beams", store=store, options={"strategy": strategy}, rows=1)
            for store in ("memory", "disk") for strategy in STRATEGIES
        ]  # fmt: skip
    for name, variants in VARIANTS.items():
        for options in variants:
            rows = 1 if name == "kvswap" else 2  # whole sectors, unpadded: its fused fetch
            found.append(
                Case(family="qwen3", policy=name, store="disk", options=options, rows=rows)
            )
            if POLICIES[name].device_tier and not NOT_ON_HOST & {*options.items()}:
                found.append(Case(family="qwen3", policy=name, store="host", options=options))
    found.append(Case(family="gemma3", policy="hillinfer", options={"near": True}))
    found.append(Case(family="llama", policy="dynakv", store="disk", options={"virtual": True}))
    found.append(Case(family="gemma3", policy="louiskv", store="host", options={"predict": True}))
    found += [Case(family=f, policy="kvswap", store="disk", exact=True) for f in FAMILIES]
    if device == "cuda":
        found += [replace(case, graphs=True) for case in found if case.store == "host"]
    return found


def _watch(cache: TieredCache, note: Note) -> None:
    """Tell what each layer selects, lacks and attends to. All that is private is in here."""
    from penstock.engine.device_tier.device_layer import DeviceLayer
    from penstock.engine.retrieval_layer import RetrievalLayer

    def rows(ids: Any, valid: Any) -> list[list[int]]:
        valid = ids >= 0 if valid is None else valid & (ids >= 0)
        return [sorted(map(int, row[shown])) for row, shown in zip(ids, valid, strict=True)]

    def follow(layer: Any, finish: Callable[[], Any]) -> Callable[[], Any]:
        def finished() -> Any:
            fetched = finish()
            if fetched is not None:
                selection, plan = fetched
                note(layer.layer_idx, "selected", rows(selection.unit_ids, selection.valid))
                lacking = zip(plan.rows.tolist(), plan.units.tolist(), strict=True)
                note(layer.layer_idx, "missing", [sorted(r * MAX_TOKENS + u for r, u in lacking)])
            return fetched

        return finished

    def listen(layer: Any, make_list: Callable[[Any], None]) -> Callable[[Any], None]:
        def listed(wanted: Any) -> None:
            ids, valid, due = (each.cpu() for each in wanted)
            note(layer.layer_idx, "selected", rows(ids, valid & due[:, None]))
            make_list(wanted)

        return listed

    def see(layer: int, seen: Tensor) -> None:
        note(layer, "attended", [row.nonzero()[:, 0].tolist() for row in seen.cpu()])

    for layer in cache.tiers.layers:
        if isinstance(layer, RetrievalLayer):
            cast(Any, layer)._finish_fetch = follow(layer, layer._finish_fetch)
            layer.observer = see
        elif isinstance(layer, DeviceLayer):
            cast(Any, layer)._list = listen(layer, layer._list)
            layer.observer = see


def _told(lists: list[list[int]]) -> str:
    """Lists as a digest, their lengths, and the first few of each."""
    digest = hashlib.sha256(json.dumps(lists).encode()).hexdigest()[:12]
    parts = [f"{len(row)}: {' '.join(map(str, row[:IN_THE_CLEAR]))}" for row in lists]
    return f"{digest} ({'; '.join(parts)})"


class _Steps:
    """A logits processor: begins to watch behind the prompt, and counts the steps."""

    def __init__(self, cache: TieredCache, *, watches: bool) -> None:
        self.selections: dict[str, dict[str, str]] = {}
        self._cache, self._watches, self._step = cache, watches, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self._step and self._watches:
            _watch(self._cache, self._note)
        self._step += 1
        return scores

    def _note(self, layer: int, what: str, lists: list[list[int]]) -> None:
        place = self.selections.setdefault(f"step {self._step}, layer {layer}", {})
        place[what] = " + ".join([*filter(None, [place.get(what)]), _told(lists)])


def make_policy(case: Case) -> SelectionPolicy:
    """The case's policy: a small selection, and what would follow from rates fixed."""
    kind = POLICIES[case.policy]
    wanted = {
        "selected_tokens": 32, "window_tokens": 8, "sink_tokens": 4, "hot_tokens": 64,
        "group_tokens": min(8, getattr(kind(), "group_tokens", 8)), "near": False,
        "timeout_s": 300.0,
    }  # fmt: skip
    known = {each.name for each in fields(kind)}
    plain = {name: value for name, value in wanted.items() if name in known}
    return kind(**(plain | case.options))


def run(case: Case, model: PreTrainedModel) -> Record:
    """What a case does, as plain data."""
    with tempfile.TemporaryDirectory() as folder:
        store = folder if case.store == "disk" else case.store
        if case.policy == "beams":
            return _search(case, model, store)
        policy, memory = make_policy(case), case.rows * AMPLE_BYTES
        options: dict[str, Any] = {
            "store": store, "max_tokens": MAX_TOKENS, "batch_size": case.rows, "exact": case.exact,
            "cuda_graphs": case.graphs,
        }  # fmt: skip
        if case.tight:
            try:
                TieredCache(model, policy, 1, **options).close()
            except BudgetError as error:
                memory = error.needed_bytes or memory
        with TieredCache(model, policy, memory, **options) as cache:
            return _generate(case, model, cache)


def _generate(case: Case, model: PreTrainedModel, cache: TieredCache) -> Record:
    steps, given = _Steps(cache, watches=not case.graphs), inspect.signature(type(model).forward)
    name = "cache" if "cache" in given.parameters else "past_key_values"
    ids = _prompt(case.rows).to(model.device)
    out = cast(Any, model).generate(
        input_ids=ids, attention_mask=(ids > 0).long(), **{name: cache}, do_sample=False,
        max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=None, prefill_chunk_size=64,
        logits_processor=LogitsProcessorList([steps]),
    )  # fmt: skip
    stats, chosen = cache.stats, cache.policy
    streams = case.store == "host" and not chosen.retrieves  # which counts no reads
    moves = not (chosen.drops or chosen.stays_resident or streams)
    if moves and not stats.decode.read_bytes:
        raise AssertionError(f"{case.name}: nothing was fetched")
    if moves and chosen.retrieves and not (case.exact or case.graphs or steps.selections):
        raise AssertionError(f"{case.name}: no selection was seen")
    return {
        "tokens": out[:, PROMPT_TOKENS:].tolist(), "selections": steps.selections,
        "counters": {
            "prefill": _timeless(stats.prefill.as_dict()),
            "decode": _timeless(stats.decode.as_dict()),
        },
        "ledger": asdict(cache.report()),
    }  # fmt: skip


def _search(case: Case, model: PreTrainedModel, store: str) -> Record:
    room = None if case.options["strategy"] == "resident" else BEAM_BYTES
    memory = SearchMemory(memory=room, store=store, **case.options)
    sizes: Record = {"beams": 8, "width": 2, "step_tokens": 8, "max_new_tokens": 32}
    params = SearchParams(**sizes, seed=7, ignore_end=True)
    found = BeamSearcher(model, memory=memory).search(_prompt(1)[0].tolist(), params)
    assert found.place is not None
    plain = found.as_dict()
    if room is not None and not plain["traffic"]["loaded_bytes"]:
        raise AssertionError(f"{case.name}: nothing was loaded")
    return {
        "tokens": [beam.token_ids for beam in found.beams],
        "tree": {str(node["id"]): [node["parent"], node["token_ids"]] for node in plain["tree"]},
        "groups": [record.group_sizes for record in found.steps],
        "counters": _timeless(plain["traffic"]),
        "ledger": asdict(found.place.memory),
    }


def _timeless(counters: Record) -> Record:
    """Counts that are not of time; what was not counted is left out."""
    return {
        key: n for key, n in counters.items() if n and key != "seconds" and not key.endswith("_s")
    }


def _prompt(rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (rows, PROMPT_TOKENS), generator=draw)
    ids[1:, :PADDING] = 0
    return ids


def take(device: str, chosen: Iterable[Case]) -> Record:
    """Run cases; says how long each one took."""
    models: dict[str, PreTrainedModel] = {}
    records: Record = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in chosen:
            if case.family not in models:
                models[case.family] = cast(Any, tiny_model(case.family)).to(device)
            began_s = time.process_time()
            try:
                records[case.name] = run(case, models[case.family])
            except (PenstockError, AssertionError) as error:
                records[case.name] = {"failed": f"{type(error).__name__}: {error}"}
            sys.stderr.write(f"{time.process_time() - began_s:6.2f} s  {case.name}\n")
    return {
        "format": FORMAT,
        "made": {"device": device, "torch": torch.__version__,
                 "transformers": transformers.__version__},
        "cases": records,
    }  # fmt: skip


def differences(before: Record, after: Record) -> list[str]:
    """What two snapshots differ in, a line for each case and field, and the first few places."""
    if before.get("format") != FORMAT:
        return [f"the file is not a {FORMAT}"]
    lines = [
        f"made with {name} {value}, now {after['made'].get(name)}"
        for name, value in before["made"].items() if after["made"].get(name) != value
    ]  # fmt: skip
    old, new = before["cases"], after["cases"]
    lines += [f"{name}: the case is gone" for name in old if name not in new]
    lines += [f"{name}: the case is new" for name in new if name not in old]
    for name in (name for name in old if name in new):
        for part in dict.fromkeys([*old[name], *new[name]]):
            places = list(_places(old[name].get(part), new[name].get(part), ""))
            if places:
                lines.append(f"{name}: {part}: {len(places)} differ")
                lines += [f"    {place}" for place in places[:SHOWN]]
    return lines


def _places(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _places(old.get(key), new.get(key), f"{path} {key}".strip())
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _places(one, other, f"{path} [{at}]".strip())
    elif old != new:
        yield f"{path}: was {old}, is {new}"


def main(arguments: list[str] | None = None) -> int:
    """Write or compare; 1 where a case fails or differs."""
    parser = argparse.ArgumentParser(prog="snapshot", description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="*", help="cases, as family/policy/store/options; *")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="run them in another order")
    args = parser.parse_args(arguments)
    chosen = [case for case in cases(args.device) if fnmatch.fnmatch(case.name, args.only)]
    if args.shuffle is not None:
        random.Random(args.shuffle).shuffle(chosen)
    found = take(args.device, chosen)
    if args.action == "write":
        found["cases"] = dict(sorted(found["cases"].items()))
        args.file.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        failed = [
            (name, case["failed"]) for name, case in found["cases"].items() if "failed" in case
        ]
        sys.stdout.writelines(f"{name}: {why}\n" for name, why in failed)
        return int(bool(failed))
    before = json.loads(args.file.read_text(encoding="utf-8"))
    before["cases"] = {
        name: case for name, case in before["cases"].items() if fnmatch.fnmatch(name, args.only)
    }
    lines = differences(before, found)
    sys.stdout.write("\n".join([*lines, f"{len(found['cases'])} cases, {len(lines)} lines differ"]))
    sys.stdout.write("\n")
    return int(bool(lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
