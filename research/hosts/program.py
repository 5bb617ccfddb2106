"""`python -m research.hosts`: what a hundred hosts do, and where that breaks, by simulation.

Times and bytes of one host come from a result of `research.hosts.single`. Parts: "load" and "skew"
compare four ways to route; "loss" takes hosts away; "network" slows their cards; "ring" counts, by
hashes alone, the documents that move when a host comes or goes. `simulation` lists what is assumed.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from penstock.cluster.affinity import Ring
from penstock.core.errors import ConfigError
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, without_path
from penstock.evaluate.sitting import Sitting, closed
from penstock.evaluate.text_table import format_table
from research.hosts.simulation import (
    POLICIES,
    Scenario,
    Simulation,
    Single,
    Walks,
    host_names,
)

Row = dict[str, Any]
KIND = "hosts"
PARTS = ("load", "skew", "loss", "network", "ring")
NAMES = {
    "bounded": "bounded loads", "plain": "plain hashing", "random": "random",
    "least": "least loaded",
}  # fmt: skip
GBIT_S = 1.25e8
"""Bytes a second of a gigabit."""


def scenarios(part: str, **common: Any) -> Iterator[Scenario]:
    """The simulations of a part."""
    if part == "load":
        for policy in POLICIES:
            for load in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
                yield Scenario(policy=policy, load=load, skew=0.6, **common)
    elif part == "skew":
        for policy in POLICIES:
            for skew in (0.0, 0.3, 0.6, 0.9, 1.2):
                yield Scenario(policy=policy, skew=skew, **common)
    elif part == "loss":
        for copies in (1, 2):
            for lost in (1, 10):
                for load in (0.5, 0.7, 0.85):
                    yield Scenario(
                        policy="bounded", load=load, skew=0.6, copies=copies, lost=lost, **common
                    )
    elif part == "network":
        for policy in ("bounded", "random", "least"):
            for gbit_s in (0.05, 0.1, 1.0, 10.0):
                yield Scenario(policy=policy, load=0.7, network_bytes_s=gbit_s * GBIT_S, **common)


def ring_rows(hosts: int, documents: int) -> list[Row]:
    """How evenly a ring divides documents, and which of them move with one host."""
    homes = {}
    for count in (hosts - 1, hosts, hosts + 1):
        ring = Ring(host_names(count))
        homes[count] = [ring.walk(str(each))[0] for each in range(documents)]
    out = []
    for count in (hosts - 1, hosts + 1):
        moved = sum(old != new for old, new in zip(homes[hosts], homes[count], strict=True))
        of_hosts = dict.fromkeys(host_names(count), 0)
        for name in homes[count]:
            of_hosts[name] += 1
        modulo = sum(each % hosts != each % count for each in range(documents)) / documents
        out.append({
            "from_hosts": hosts, "to_hosts": count, "documents": documents,
            "moved": moved / documents, "moved_by_modulo": modulo,
            "most": max(of_hosts.values()), "least": min(of_hosts.values()),
            "mean": documents / count,
        })  # fmt: skip
    return out


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--single", required=True, metavar="FILE", help="a result of research.hosts.single")
    add("--parts", default=",".join(PARTS))
    add("--hosts", type=int, default=100)
    add("--documents", type=int, default=10_000)
    add("--requests", type=int, default=20_000, help="of each simulation")
    args = read_options(parser, arguments, resume=False, minutes=False)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        raise ConfigError(f"no part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if args.hosts < 20 or args.documents < args.hosts or args.requests < 100:
        raise ConfigError("--hosts is at least 20, --requests 100, and --documents --hosts")
    return args


def run(arguments: Sequence[str]) -> Result:
    """Simulate, print the tables, save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    measured = Result.load(args.single)
    if measured.kind != "hosts.single":
        raise ConfigError(f"--single is a result of {measured.kind}, not of hosts.single")
    single = Single.of_figures(measured.figures)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json", "single")}
    settings["single"] = {
        "machine": measured.machine, "commit": measured.commit, "settings": measured.settings,
    }  # fmt: skip
    shown = without_path(arguments, "--single", args.single)
    result = Result.begin(KIND, shown, settings, seed=args.seed, package="research")
    sitting = Sitting(result, args)
    common = {"hosts": args.hosts, "documents": args.documents, "requests": args.requests}
    jobs = [(part, each) for part in args.parts for each in scenarios(part, **common)]
    figures: Row = {
        "document_bytes": single.document_bytes, "hit_s": single.hit_s(Scenario.answer), "rows": [],
        "prefill_s": sum(single.prefill_s) / len(single.prefill_s),
        "capacity_per_s": args.hosts * Scenario.workers / single.hit_s(Scenario.answer),
    }  # fmt: skip
    if "ring" in args.parts:
        figures["ring"] = ring_rows(args.hosts, 10 * args.documents)
    walks: dict[int, Walks] = {}
    progress = Progress(len(jobs))
    for part, scenario in jobs:
        for lost in (0, scenario.lost):
            walks.setdefault(lost, Walks(host_names(args.hosts, lost)))
        simulation = Simulation(scenario, single, args.seed, walks[0], walks[scenario.lost])
        figures["rows"].append({"part": part, **asdict(scenario), **simulation.run()})
        progress.step(1)
        sitting.keep(figures)
    return closed(result, args, hosts_table(figures))


def hosts_table(figures: Row) -> str:
    """Percentiles of the first token, and what was copied, for each simulation."""
    header = ["part, way", "load", "skew", "copies", "lost", "Gb/s", "p50 s", "p99", "p99.9",
              "hits", "copied", "prefilled", "spilled", "card"]  # fmt: skip
    rows = [
        [
            f"{row['part']}, {NAMES[row['policy']]}", f"{row['load']:g}", f"{row['skew']:g}",
            str(row["copies"]), str(row["lost"]), f"{row['network_bytes_s'] / GBIT_S:g}",
            f"{row['first_p50_s']:.2f}", f"{row['first_p99_s']:.2f}", f"{row['first_p999_s']:.2f}",
            *(f"{row[name]:.1%}" for name in ("hit_rate", "copied", "prefilled", "spilled")),
            f"{row['busiest_card']:.1%}",
        ]
        for row in figures["rows"]
    ]  # fmt: skip
    parts = [format_table(header, rows)] if rows else []
    parts += [
        f"{one['from_hosts']} to {one['to_hosts']} hosts: {one['moved']:.2%} of the documents move "
        f"({one['moved_by_modulo']:.0%} by a plain remainder); a host has {one['least']:,} to "
        f"{one['most']:,} of {one['documents']:,}"
        for one in figures.get("ring", [])
    ]
    return "\n".join(parts)
