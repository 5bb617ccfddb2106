"""A conversation that is reopened after a restart, beside one that goes on, and beside prefill."""

import argparse
import multiprocessing
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.documents.sessions import Sessions
from penstock.documents.settings import DocumentSettings
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.generation.serving.engine import Engine
from penstock.generation.serving.request import Request
from penstock.models.loader import load
from research.serving.clients import Client

Row = dict[str, Any]
_MORE = 32
"""Tokens of the second turn's question."""
_MAX_BYTES = 64 << 30


def reopened(ids: Sequence[int], args: argparse.Namespace) -> Row:
    """Two turns of a conversation; then its second turn after a restart, in a further process.

    The first turn is prefilled. The second goes on from what is stored of it, in the first
    process and in the other one alike. Files are written through and dropped from memory between
    the two, where the system can.

    Args:
        ids: of a text, for both turns.
        args: of the program; `reopen` is the length of the first turn.
    """
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(dir=_place(args)) as name,
        context.Pool(1, maxtasksperchild=1) as pool,
    ):
        key, folder = secrets.token_bytes(32), Path(name)
        prompt, more = list(ids[: args.reopen]), list(ids[args.reopen : args.reopen + _MORE])
        first, turn, second = pool.apply(_first_life, (args, folder, key, prompt, more))
        later, open_s = pool.apply(_second_life, (args, folder / "kept", key, turn))
    return {
        "tokens": len(prompt), "turn_tokens": len(turn), "open_s": open_s,
        "prefill_first_token_s": first["first_token_s"],
        "going_on_first_token_s": second["first_token_s"],
        "reopened_first_token_s": later["first_token_s"],
        "going_on_cached_tokens": second["cached_tokens"],
        "reopened_cached_tokens": later["cached_tokens"],
        "times_sooner": first["first_token_s"] / later["first_token_s"],
        "same_answer": later["token_ids"] == second["token_ids"],
    }  # fmt: skip


def _place(args: argparse.Namespace) -> str | None:
    """Where stored conversations go: beside the caches, if those have a folder."""
    return args.disk if Path(args.disk).is_dir() else None


@contextmanager
def _served(
    args: argparse.Namespace, folder: Path, key: bytes
) -> Iterator[tuple[Engine, Sessions, float]]:
    """As `penstock serve` does, once it has answered something short.

    Yields:
        The third: seconds until it had found what is stored.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    settings = DocumentSettings(key=key, store=args.disk)
    began_s = time.perf_counter()
    with Sessions(
        loaded, folder, max_bytes=_MAX_BYTES, policy=args.policy, settings=settings
    ) as kept:
        open_s = time.perf_counter() - began_s
        llm = LLM(loaded, policy=args.policy, store=args.disk)
        with Engine(
            llm, memory=args.memory, max_running=args.running, prefill_chunk_size=args.chunk,
            sessions=kept,
        ) as engine:  # fmt: skip
            Client(engine, _request(list(range(5, 45)), 2)).wait()
            yield engine, kept, open_s


def _request(prompt: list[int], answer: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    return Request(prompt=prompt, sampling=params)


def _first_life(
    args: argparse.Namespace, folder: Path, key: bytes, prompt: list[int], more: list[int]
) -> tuple[Row, list[int], Row]:
    with _served(args, folder / "own", key) as (engine, kept, _):
        first = Client(engine, _request(prompt, args.answer)).wait()
        while kept.is_storing(""):
            time.sleep(0.01)
        _copy(folder / "own", folder / "kept")
        turn = [*prompt, *first["token_ids"], *more]
        return first, turn, Client(engine, _request(turn, args.answer)).wait()


def _second_life(
    args: argparse.Namespace, folder: Path, key: bytes, turn: list[int]
) -> tuple[Row, float]:
    with _served(args, folder, key) as (engine, _, open_s):
        return Client(engine, _request(turn, args.answer)).wait(), open_s


def _copy(folder: Path, to: Path) -> None:
    """Copy a folder whose files are not in memory then."""
    shutil.copytree(folder, to)
    for path in to.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with open(path, "rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
