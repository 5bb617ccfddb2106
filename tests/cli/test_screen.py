"""The screen says what happened, and says "simulated" where it must."""

import io
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.process_sizes import ProcessSizes
from penstock.cli.screen import AnswerScreen, TokenProgress, report_rows, show_report
from penstock.core.ledger import MemoryReport
from penstock.core.stats import PhaseStats, RunStats
from penstock.generation.output import RunReport
from penstock.generation.verified_counts import Verified

SIZES = ProcessSizes(weights_bytes=257 << 20, process_peak_bytes=737 << 20, device_peak_bytes=None)


def report(**changes: Any) -> RunReport:
    decode = PhaseStats(
        tokens=10,
        seconds=2.0,
        read_bytes=10 << 20,
        units_wanted=100,
        units_hit=61,
        stall_s=0.1,
    )
    memory = MemoryReport(
        limit_bytes=4 << 20,
        used_bytes=2 << 20,
        peak_bytes=3 << 20,
        full_cache_bytes=102 << 20,
        items={"index": 2 << 20},
    )
    fields: dict[str, Any] = {
        "policy": "kvswap",
        "exact": False,
        "prompt_tokens": 16_000,
        "new_tokens": 11,
        "prefill_s": 8.0,
        "decode_s": 2.5,
        "decode_tokens": 10,
        "stats": RunStats(decode=decode),
        "memory": memory,
        "store": "/disk, direct I/O",
        "simulated": None,
        "notices": ("adapter made from [the] prompt",),
    }
    return RunReport(**{**fields, **changes})


def test_what_was_kept_without_asking_is_said_apart() -> None:
    decode = PhaseStats(tokens=10, units_wanted=100, units_hit=61, units_reused=300)
    rows = dict(report_rows(report(stats=RunStats(decode=decode))))
    wanted = "61 % of the wanted groups were in memory, 75 % of all were kept without asking"
    assert rows["hit rate"] == wanted


def test_the_table_has_every_figure() -> None:
    rows = dict(report_rows(report()))
    assert rows == {
        "policy": "kvswap",
        "KV cache lies on": "/disk, direct I/O",
        "KV cache": "3 MiB of a budget of 4 MiB, 1/34.0 of the full 102 MiB",
        "prefill": "2,000 tokens/s, 8.0 s",
        "decode": "4.0 tokens/s, 2.50 s",
        "read per token": "1 MiB",
        "hit rate": "61 % of the wanted groups were in memory",
        "stall share": "5.0 % of decode waited for reads",
    }


def test_drafts_and_passes_stand_in_the_table() -> None:
    verified = Verified(
        passes=4, drafted=16, accepted=12, tokens=16, draft_s=1.6, pass_s=4.0, draft_bytes=16 << 20,
        pass_bytes=400 << 20,
    )  # fmt: skip
    rows = dict(report_rows(report(verified=verified, simulated="emmc")))
    assert rows["verified"] == (
        "4.0 tokens a pass: 4 exact passes, 75 % of 16 drafted tokens accepted"
    )
    mark = "s (simulated disk)"
    assert rows["time per token"] == f"0.350 {mark}; an exact pass takes 1.000 {mark}"
    assert rows["read per token"] == "26 MiB; exact reads 100 MiB"


def test_what_steps_had_of_the_attention_stands_in_the_table() -> None:
    counters = {
        "mass_steps": 200.0, "mass_captured": 180.0, "mass_variance": 0.8, "mass_capped": 50.0,
        "mass_exact": 4.0,
    }  # fmt: skip
    decode = PhaseStats(tokens=10, counters=counters)
    rows = dict(report_rows(report(stats=RunStats(decode=decode))))
    assert rows["attention"] == (
        "90.0 % ± 2.8 of it was attended to; 25 % of the layers' steps filled all slots, "
        "2.0 % were computed exactly"
    )


def test_weights_cache_and_process_stand_beside_each_other() -> None:
    rows = report_rows(report(), SIZES)
    names = [name for name, _ in rows]
    at = names.index("KV cache")
    assert names[at : at + 3] == ["KV cache", "weights", "process"]
    assert dict(rows)["weights"] == "257 MiB"
    assert dict(rows)["process"] == "737 MiB at its peak"
    on_gpu = replace(SIZES, device_peak_bytes=2 << 30)
    assert on_gpu.rows["process"] == "737 MiB at its peak, 2 GiB on the GPU"
    assert "process" not in replace(SIZES, process_peak_bytes=None).rows


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_end_table_fits_the_terminal(width: int) -> None:
    out = io.StringIO()
    show_report(Console(file=out, width=width), report(notices=()), SIZES)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()


def test_a_simulated_disk_is_called_so_beside_each_of_its_figures() -> None:
    rows = dict(report_rows(report(simulated="emmc")))
    for what in ("prefill", "decode", "stall share"):
        assert "(simulated disk)" in rows[what]


def test_one_token_has_no_decode_figures() -> None:
    rows = dict(report_rows(report(new_tokens=1, decode_tokens=0, decode_s=0.0)))
    assert rows["decode"] == "the only token came out of prefill"
    assert "stall share" not in rows


def test_exact_mode_reads_everything_and_full_reads_nothing() -> None:
    streamed = RunStats(decode=PhaseStats(tokens=1, read_bytes=1))
    rows = dict(report_rows(report(exact=True, stats=streamed)))
    assert rows["policy"] == "kvswap, exact"
    assert rows["hit rate"] == "none: every step reads the whole past"
    assert dict(report_rows(report(stats=RunStats())))["hit rate"] == "nothing to fetch"


def piped() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80), out


def test_notices_are_shown_as_written() -> None:
    console, out = piped()
    show_report(console, report(), SIZES)
    assert "note: adapter made from [the] prompt\n" in out.getvalue()
    assert "stall share" in out.getvalue()


def test_progress_in_a_pipe_is_ten_lines_at_most() -> None:
    console, out = piped()
    with TokenProgress(console) as progress:
        for done in range(1, 1001):
            progress.update(done, 1000)
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("prefill  10 %  100/1,000 tokens")
    assert lines[-1].startswith("prefill 100 %  1,000/1,000 tokens")
    assert "ETA 0 s" in lines[-1]


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    out = io.StringIO()
    with TokenProgress(Console(file=out, width=100, force_terminal=True)) as progress:
        progress.update(250, 1000)
        progress.update(500, 1000)
    assert "500/1,000 tokens" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_an_index_that_takes_a_while_is_spoken_of(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    console, out = piped()
    clock = itertools.count(1)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * seconds)
    with AnswerScreen(console, None) as screen:
        for layer in range(17):
            screen.on_index(layer / 16)
    lines = out.getvalue().splitlines()
    if seconds == 0.05:
        assert not lines
        return
    assert 5 <= len(lines) <= 10
    assert lines[-1].startswith("indexing the prompt 100%  8 s gone  ETA 0 s")


def test_an_index_on_a_terminal_has_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    out = io.StringIO()
    with AnswerScreen(Console(file=out, width=100, force_terminal=True), None) as screen:
        screen.on_progress(5, 5)
        for layer in range(5):
            screen.on_index(layer / 4)
    assert "indexing the prompt" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_the_index_is_part_of_the_prefill() -> None:
    stats = RunStats(prefill=PhaseStats(index_s=3.0))
    rows = dict(report_rows(report(stats=stats)))
    assert rows["prefill"] == "2,000 tokens/s, 8.0 s, of them 3.0 s for its index"


@pytest.mark.parametrize("quiet", [False, True])
def test_the_answer_follows_its_lead(quiet: bool) -> None:
    console, progress = piped()
    answer = io.StringIO()
    with AnswerScreen(None if quiet else console, answer, "Answer: ") as screen:
        screen.on_progress(5, 5)
        screen.on_text(0, "large")
        screen.on_text(0, " gem")
    assert answer.getvalue() == "Answer: large gem\n"
    assert bool(progress.getvalue()) != quiet


def test_further_answers_stand_behind_the_first() -> None:
    console, told = piped()
    answer = io.StringIO()
    with AnswerScreen(console, answer) as screen:
        for row, piece in ((0, "a"), (2, "x"), (1, "b"), (0, "a"), (2, "y")):
            screen.on_text(row, piece)
    assert answer.getvalue() == "aa\nb\nxy\n"
    assert told.getvalue().splitlines()[-2:] == ["answer 2", "answer 3"]


def test_no_answer_no_line() -> None:
    answer = io.StringIO()
    with AnswerScreen(None, answer, "Answer: "):
        pass
    assert answer.getvalue() == ""
