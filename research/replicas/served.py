"""Served: `penstock serve` as a process, asked over HTTP."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from penstock.core.errors import StorageError
from penstock.evaluate.process_memory import command_line

_START_S = 1800.0
_ANSWER_S = 1800.0
_SAMPLE = re.compile(r"^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Served:
    """A server, from its start to its end."""

    def __init__(self, options: Sequence[str], said: Path) -> None:
        """Start it, and wait until it answers.

        Args:
            said: a file for what it prints.

        Raises:
            StorageError: it ends instead; says why.
        """
        self._said = said.open("w+")
        command = [sys.executable, "-m", "penstock", "serve", *options, "--port", "0"]
        self._process = subprocess.Popen(command, stdout=self._said, stderr=self._said)
        try:
            self._url = self._await_url()
        except BaseException:
            self.close()
            raise

    def _await_url(self) -> str:
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            if (found := re.search(r" at (http://\S+)", self._text())) is not None:
                return found[1]
            time.sleep(0.2)
        raise StorageError(f"the server did not start: {self._text().strip()}")

    def _text(self) -> str:
        self._said.seek(0)
        return self._said.read()

    def ask(self, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        """Status, answer and headers; the headers' names are in small letters."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                status, text, given = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                status, text, given = error.code, error.read(), error.headers
        said = text.decode() if path == "/metrics" else json.loads(text)
        return status, said, {name.lower(): value for name, value in given.items()}

    def counts(self, name: str) -> dict[str, float]:
        """A metric by replica; of one server without replicas, by ""."""
        found: dict[str, float] = {}
        for each, labels, value in _SAMPLE.findall(self.ask("/metrics")[1]):
            if each == name:
                replica = re.search(r'replica="(.*?)"', labels)
                key = "" if replica is None else replica[1]
                found[key] = found.get(key, 0.0) + float(value)
        return found

    def kill(self, replica: str) -> None:
        """Kill the process of a replica.

        Raises:
            StorageError: there is none.
        """
        for each in psutil.Process(self._process.pid).children(recursive=True):
            if f"ServeReplica:penstock-{replica}:" in command_line(each):
                os.kill(each.pid, signal.SIGKILL)
                return
        raise StorageError(f"there is no process of replica {replica}")

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
