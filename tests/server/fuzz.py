"""Requests that break what a server describes, by schemathesis; for the suite, some near it.

    python -m tests.server.fuzz --requests 10000 --resume --output FILE

The program is not part of the suite. The exit status is 1 where an answer was wrong.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from penstock.core.errors import PenstockError
from penstock.documents.document_library import DocumentLibrary
from penstock.evaluate.entry import run_program
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result, public_arguments
from penstock.evaluate.sitting import Sitting, say, sit
from penstock.generation.engine import LLM
from penstock.generation.serving.engine import Engine
from penstock.server.app import make_app
from penstock.server.serving import bind, in_background
from penstock.server.settings import ServerSettings
from penstock.testing.tiny_chat import tiny_chat_model

HELLO = [{"role": "user", "content": "Hello"}]
STATUSES = (200, 201, 400, 404, 409, 413, 429, 501)
BATCH = 100
LONGEST_S = 300.0
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=8), one, max_size=3),
    max_leaves=6,
)  # fmt: skip


def bodies(app: FastAPI) -> Any:
    """Requests near those that the description allows: fields of its schemas, other values."""
    described = app.openapi()
    schemas = described["components"]["schemas"]
    made = []
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            content = about.get("requestBody", {}).get("content", {})
            name = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            fields = schemas.get(name.rpartition("/")[2], {}).get("properties", {})
            valid: dict[str, Any] = {
                "messages": st.just(HELLO), "prompt": st.just("a"), "input": st.just("a"),
                "max_tokens": st.just(2), "max_output_tokens": st.just(2), "n": st.just(1),
                "max_completion_tokens": st.just(2), "text": JSON, "name": st.text(max_size=5),
            }  # fmt: skip
            values = {each: valid.get(each, JSON) | JSON for each in fields}
            body = st.fixed_dictionaries(
                {each: valid[each] for each in fields if each in valid and each != "text"},
                optional={each: values[each] for each in fields if each not in valid},
            )
            wild = st.fixed_dictionaries({}, optional=values) | JSON
            made.append(st.tuples(st.just(method), st.just(path), body | wild))
    return st.one_of(made)


def fuzz(app: FastAPI, ask: Callable[..., Any], examples: int) -> None:
    """Every answer is one that the API has, whatever was asked."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(bodies(app))
    def asked(request: tuple[str, str, Any]) -> None:
        method, path, body = request
        path = path.replace("{name}", "none").replace("{name:path}", "none")
        data = json.dumps(body).encode()
        sent = {} if method == "get" else {"content": data}
        answer = ask(method, path, headers={"Content-Type": "application/json"}, **sent)
        assert answer.status_code in STATUSES, (request, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], request

    asked()


class Requests:
    """Batches of malformed requests; a `Work`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._asked, self._wrong = 0, list[str]()
        self._answers: Counter[str] = Counter()
        self._samples: list[dict[str, float]] = []
        self._slowest_s = 0.0

    def take_up(self, former: Result) -> None:
        """Go on behind its last batch."""
        had = former.figures
        self._asked, self._wrong, self._samples = had["asked"], had["wrong"], had["samples"]
        self._answers, self._slowest_s = Counter(had["answers"]), had["slowest_s"]

    def figures(self) -> dict[str, Any]:
        """How many were asked and what they got, by status; memory behind each batch."""
        return {
            "asked": self._asked, "answers": dict(self._answers), "wrong": self._wrong,
            "slowest_s": self._slowest_s, "samples": self._samples,
        }  # fmt: skip

    def report(self) -> str:
        """Those figures."""
        return "\n".join([f"{self._asked} requests: {dict(self._answers)}", *self._wrong])

    def run(self, sitting: Sitting) -> None:
        """Ask as many as are left."""
        llm = LLM(tiny_chat_model(), store="memory", memory=None, adapter="none")
        limits = ServerSettings(model_name="tiny", max_answer_tokens=4)
        with tempfile.TemporaryDirectory() as folder, Engine(llm, memory="256MiB") as engine:
            app = make_app(engine, limits, DocumentLibrary(Path(folder) / "library"))
            with bind("127.0.0.1", 0) as listening, in_background(app, listening) as where:
                schemas = import_module("schemathesis")
                mode = import_module("schemathesis.generation").GenerationMode.NEGATIVE
                strategy = schemas.openapi.from_url(f"{where}/openapi.json").as_strategy(
                    generation_mode=mode
                )
                while self._asked < self._args.requests and not sitting.time_is_up():
                    self._batch(strategy, folder)
                    self._look(engine)
                    sitting.keep(self.figures())
                    say(f"{self._asked} requests, {len(self._wrong)} wrong, {self._samples[-1]}")
            app.state.backend.shelf.close()

    def _batch(self, strategy: Any, folder: str) -> None:
        @seed(self._args.seed + self._asked)
        @settings(
            max_examples=BATCH, suppress_health_check=list(HealthCheck), deadline=None,
            database=None, phases=[Phase.generate],
        )  # fmt: skip
        @given(strategy)
        def asked(case: Any) -> None:
            began_s = time.monotonic()
            try:
                answer = case.call(timeout=LONGEST_S)
                said = answer.text
                is_known = answer.status_code in STATUSES or answer.status_code == 405
                self._answers[str(answer.status_code)] += 1
                if not is_known or (answer.status_code >= 400 and not answer.json()["error"]):
                    self._note(f"{answer.status_code} {said}", case)
                if folder in said or "Traceback" in said:
                    self._note(f"says too much: {said}", case)
            except Exception as error:
                self._note(repr(error), case)
            self._asked += 1
            self._slowest_s = max(self._slowest_s, time.monotonic() - began_s)

        asked()

    def _note(self, what: str, case: Any) -> None:
        self._wrong.append(f"{case.method} {case.formatted_path}: {what[:300]} {case.body!r:.300}")
        say(f"WRONG {self._wrong[-1]}")

    def _look(self, engine: Engine) -> None:
        """All that was asked is over, and its memory given back."""
        until = time.monotonic() + LONGEST_S
        while (stats := engine.stats()).running or stats.waiting or stats.used_bytes:
            if time.monotonic() > until:
                self._wrong.append(f"requests are left: {stats}")
                break
            time.sleep(0.05)
        uss = psutil.Process().memory_full_info().uss
        self._samples.append({"asked": self._asked, "memory_mib": uss / 2**20})


def run(arguments: Sequence[str]) -> None:
    """Ask as many as the command line says.

    Raises:
        PenstockError: bad arguments, or answers that the API does not have.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.server.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    args = read_options(parser, arguments)
    result = Result.begin("server-fuzz", [], {"requests": args.requests}, seed=args.seed)
    result.command = f"python -m tests.server.fuzz {public_arguments(arguments)}"
    result.libraries["schemathesis"] = version("schemathesis")
    sit(Sitting(result, args), Requests(args), args)
    if result.figures["wrong"]:
        raise PenstockError(f"{len(result.figures['wrong'])} answers were wrong")


if __name__ == "__main__":
    run_program(run)
