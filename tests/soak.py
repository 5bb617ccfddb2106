"""A soak: random operations, interrupts and faults in one process, whose resources stay flat.

    python -m tests.soak --minutes 120 --out benchmarks/results/soak.json

Not part of the suite. The exit status is 1 where a resource grew or an exact answer was wrong.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from penstock import (
    LLM,
    POLICIES,
    BeamSearcher,
    Document,
    DocumentSettings,
    PenstockError,
    SamplingParams,
    SearchMemory,
    SearchParams,
    TieredCache,
)
from penstock.cli.entry import set_defaults
from penstock.evaluate.process_memory import anonymous_bytes
from penstock.evaluate.result import Result
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import BUNDLED, load
from penstock.testing.faulty_file import FaultyFile
from penstock.testing.tiny_models import VOCABULARY, tiny_model
from tests.mallinfo import Malloc

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "gpt_neox", "phi3", BUNDLED)
BUNDLED_SCALE = 8
"""So many times as many tokens go to the bundled model as to the tiny ones."""
MEMORIES = ("auto", "auto", "2/3", "1/2", "256KiB", "1MiB", None)
MOST_DOCUMENTS = 6
SAMPLE_SECONDS = 20.0
LIMITS = {"memory_mib": 8.0, "descriptors": 2.0, "threads": 2.0, "disk_mib": 4.0, "children": 0.5}
"""How much higher the median of the last quarter may be than that of the second quarter."""


class Boom(Exception):
    """A fault that the soak plants in a model."""


class Soak:
    """Models, documents and a folder, and the operations on them."""

    def __init__(self, seed: int, folder: Path, *, faults: bool = True) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.faults = faults
        self.scale = 1
        self.models = {name: self._make(name) for name in FAMILIES}
        self.documents: dict[Path, str] = {}
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.made = 0

    # Operations -----------------------------------------------------------------------------

    def converse(self) -> None:
        """Several turns on one cache, with a crop, a reset or a fault between."""
        family, model = self._model()
        exact = self.random.random() < 0.3
        with TieredCache(
            model, self.random.choice(list(POLICIES)), self.random.choice(MEMORIES),
            self._store(), max_tokens=320 * self.scale, exact=exact,
            must_tier=self.random.random() < 0.5,
        ) as cache:  # fmt: skip
            ids = self._tokens(20, 120)
            for _ in range(self.random.randint(1, 3)):
                with self._fault(model):
                    ids = self._turn(model, cache, ids)
                if exact and family != BUNDLED:  # in bf16 the two best may be too near
                    self._check(family, model, ids[: cache.get_seq_length() + 1])
                if (
                    self.random.random() < 0.3 and "gemma" not in family
                ):  # windows cannot be cropped
                    cache.crop(max(1, cache.get_seq_length() - self.random.randint(1, 10)))
                    ids = ids[: cache.get_seq_length()]
                if self.random.random() < 0.1:
                    cache.reset()
                ids = ids + self._tokens(1, 30)

    def answer(self) -> None:
        """A batch of prompts through LLM, greedy or sampled."""
        _, model = self._model()
        llm = LLM(
            model, memory=self.random.choice(MEMORIES), store=self._store(),
            policy=self.random.choice(list(POLICIES)),
        )  # fmt: skip
        params = SamplingParams(
            temperature=self.random.choice((0, 0.8)), seed=self.random.randrange(1000),
            max_tokens=self.random.randint(1, 24),
        )  # fmt: skip
        with self._fault(model):
            llm.generate([self._tokens(5, 120) for _ in range(self.random.randint(1, 4))], params)

    def add(self) -> None:
        """A document more; the oldest goes."""
        family, model = self._model()
        self.made += 1
        path = self.folder / f"document-{self.made}"
        policy = self.random.choice(["kvswap", "flexgen", "quest", "louiskv", "dynakv"])
        settings = self._settings()
        while len(self.documents) >= MOST_DOCUMENTS:
            self._drop(next(iter(self.documents)))
        with self._fault(model):
            Document.create(
                model, self._tokens(30, 200), path, policy=policy, settings=settings
            ).close()
        self.documents[path] = family

    def ask(self) -> None:
        """A question to a document, perhaps damaged before, perhaps kept behind it."""
        if not self.documents:
            return
        path, family = self.random.choice(list(self.documents.items()))
        if self.random.random() < 0.2:
            self._damage(path)
        model = self._use(family)
        with Document.open(model, path, settings=self._settings()) as document, self._fault(model):
            document.ask(
                [self._tokens(2, 9)],
                SamplingParams(temperature=0, max_tokens=6),
                keep=self.random.random() < 0.3 and document.about.tokens < 300 * self.scale,
            )
            if self.random.random() < 0.2:
                document.verify()

    def search(self) -> None:
        """A step-wise search."""
        _, model = self._model()
        if "gemma" in type(model).__name__.lower():
            return
        searcher = BeamSearcher(
            model, memory=SearchMemory(memory="1/2", store=self._store()), scorer="logprob"
        )
        with self._fault(model):
            searcher.search(
                self._tokens(10, 40),
                SearchParams(beams=4, width=2, step_tokens=4, max_new_tokens=16),
            )

    def swap(self) -> None:
        """A model goes and another comes."""
        family = self.random.choice(list(self.models))
        self.models[family] = self._make(family)

    def threads(self) -> None:
        """Caches of several threads on one model."""
        _, model = self._model()
        policies = [self.random.choice(list(POLICIES)) for _ in range(3)]
        prompts = [self._tokens(20, 80) for _ in policies]

        def run(policy: str, prompt: list[int]) -> None:
            with contextlib.suppress(PenstockError, Boom):
                LLM(model, policy=policy, memory="auto", store="memory").generate(
                    [prompt], SamplingParams(temperature=0, max_tokens=6)
                )

        workers = [
            threading.Thread(target=run, args=given, daemon=True)
            for given in zip(policies, prompts, strict=True)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    # Parts ----------------------------------------------------------------------------------

    def _make(self, family: str) -> Any:
        return load(BUNDLED).model if family == BUNDLED else tiny_model(family)

    def _model(self) -> tuple[str, Any]:
        family = self.random.choice(list(self.models))
        return family, self._use(family)

    def _use(self, family: str) -> Any:
        self.scale = BUNDLED_SCALE if family == BUNDLED else 1
        return self.models[family]

    def _store(self) -> str:
        return self.random.choice(["memory", str(self.folder), str(self.folder)])

    def _tokens(self, least: int, most: int) -> list[int]:
        count = self.random.randint(least, most) * self.scale
        return [self.random.randrange(3, VOCABULARY) for _ in range(count)]

    def _settings(self) -> DocumentSettings:
        if not self.faults or self.random.random() > 0.15:
            return DocumentSettings(store=str(self.folder))
        number = self.random.randrange(40)
        return DocumentSettings(
            store=str(self.folder),
            wrap=lambda file: FaultyFile(file, failing_reads=[number], failing_writes=[number]),
        )

    def _turn(self, model: Any, cache: TieredCache, ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt, **cache_argument(model, cache), max_new_tokens=self.random.randint(1, 12),
            do_sample=False, eos_token_id=None, pad_token_id=0,
            # Without it transformers hides tokens of an earlier answer that are the pad token.
            attention_mask=torch.ones_like(prompt),
        )  # fmt: skip
        found: list[int] = out[0].tolist()
        return found

    def _check(self, family: str, model: Any, ids: list[int]) -> None:
        """The last token is, by full attention, one of the best that there are."""
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]]), use_cache=False)
        last = logits.logits[0, -1]
        if last.max() - last[ids[-1]] > 1e-3:
            self.wrong.append(f"{family}: {ids}")

    @contextlib.contextmanager
    def _fault(self, model: Any) -> Iterator[None]:
        """Now and then one of a model's modules raises in one of its next calls."""
        if not self.faults or self.random.random() > 0.15:
            yield
            return
        modules = [m for n, m in model.named_modules() if n.endswith(("mlp", "self_attn", "norm"))]
        left = self.random.randrange(1, 12)

        def count(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Boom

        handle = self.random.choice(modules or [model]).register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()

    def _damage(self, path: Path) -> None:
        files = sorted(p for p in path.iterdir() if p.is_file() and p.stat().st_size)
        if not files:
            return
        victim = self.random.choice(files)
        with open(victim, "r+b") as file:
            file.seek(self.random.randrange(victim.stat().st_size))
            file.write(bytes([self.random.randrange(256)]))

    def _drop(self, path: Path) -> None:
        self.documents.pop(path)
        shutil.rmtree(path, ignore_errors=True)

    def step(self) -> None:
        """One operation, perhaps interrupted; what it may raise is counted."""
        does: list[tuple[Callable[[], None], int]] = [
            (self.converse, 8), (self.answer, 6), (self.add, 2), (self.ask, 5), (self.search, 2),
            (self.swap, 1), (self.threads, 1),
        ]  # fmt: skip
        [operation] = self.random.choices([do for do, _ in does], [weight for _, weight in does])
        self.counts[operation.__name__] += 1
        timer = None
        if self.faults and self.random.random() < 0.15:
            delay = self.random.uniform(0.002, 0.3)
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        try:
            try:
                if timer is not None:
                    timer.start()
                operation()
            finally:
                if timer is not None:
                    timer.cancel()
                    timer.join()
        except KeyboardInterrupt:
            self.errors["KeyboardInterrupt"] += 1
        except (PenstockError, Boom) as error:
            self.errors[type(error).__name__] += 1
        except Exception as error:
            self.wrong.append(f"{operation.__name__}: {type(error).__name__}: {error}")
            traceback.print_exc()
        finally:
            kept = {path: name for path, name in self.documents.items() if path.exists()}
            self.documents = kept
            for path in self.folder.iterdir():
                if path not in kept and path.name.startswith("document-"):
                    shutil.rmtree(path, ignore_errors=True)


def sample(folder: Path, begun: float) -> dict[str, float]:
    """What the process holds now, garbage collected."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # free memory between blocks in use is no growth
    me = psutil.Process()
    disk = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    row = {
        "seconds": time.monotonic() - begun,
        "memory_mib": anonymous_bytes() / 2**20,
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "disk_mib": disk / 2**20,
        "children": len(me.children(recursive=True)),
        "objects": len(gc.get_objects()),
    }
    with contextlib.suppress(AttributeError, OSError):
        info = ctypes.CDLL(None).mallinfo2
        info.restype = Malloc
        held = info()
        row["malloc_in_use_mib"] = (held.uordblks + held.hblkhd) / 2**20
        row["malloc_free_mib"] = held.fordblks / 2**20
    return row


def growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """By how much the last quarter's median is above the second quarter's, for each resource."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return {
        name: statistics.median(row[name] for row in late)
        - statistics.median(row[name] for row in early)
        for name in LIMITS
    }


def note(
    result: Result, soak: Soak, samples: list[dict[str, float]], out: Path | None
) -> dict[str, float]:
    """Save what is known so far; returns the growth."""
    grown = growth(samples) if len(samples) >= 8 else {}
    result.figures = {
        "operations": dict(soak.counts), "errors": dict(soak.errors), "wrong": soak.wrong,
        "growth": grown, "limits": LIMITS, "samples": samples,
    }  # fmt: skip
    if out is not None:
        result.save(out)
    return grown


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    set_defaults()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    begun = time.monotonic()
    samples: list[dict[str, float]] = []
    settings = {"minutes": given.minutes, "faults": not given.no_faults}
    result = Result.begin("soak", sys.argv[1:], settings, seed=given.seed)
    result.command = " ".join(["python -m tests.soak", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        soak = Soak(given.seed, Path(name), faults=not given.no_faults)
        while time.monotonic() - begun < given.minutes * 60:
            with contextlib.suppress(KeyboardInterrupt):  # one that came late
                soak.step()
            if time.monotonic() - begun >= len(samples) * SAMPLE_SECONDS:
                samples.append(sample(soak.folder, begun))
                note(result, soak, samples, given.out)
                operations = sum(soak.counts.values())
                print(operations, json.dumps({k: round(v, 1) for k, v in samples[-1].items()}),
                      flush=True)  # fmt: skip
    grown = note(result, soak, samples, given.out)
    over = {name: by for name, by in grown.items() if by > LIMITS[name]}
    print(json.dumps({"growth": grown, "over": over, "errors": soak.errors, "wrong": soak.wrong}))
    return 1 if over or soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
