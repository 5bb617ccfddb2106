"""Ctrl-C at any moment: one line, exit code 130, nothing left behind."""

import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from penstock.cli import entry
from tests.ready_process import ReadyProcess

BEGUN = "from penstock.cli.entry import main; print('begun', flush=True); main()"
"""The command line; Ctrl-C while Python itself starts is Python's to answer."""


def listen_to_interrupts() -> None:
    """A child of a background job would ignore Ctrl-C, as its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(folder: Path) -> tuple[str, ...]:
    return ("demo", "--tokens", "9000", "--memory", "1/4", "--disk", str(folder))


def check(code: int, errors: str, folder: Path) -> None:
    assert code == 130, errors
    [line] = errors.splitlines()
    assert "interrupted" in line
    assert list(folder.iterdir()) == []


def test_a_device_host_ends_with_one_line(tmp_path: Path) -> None:
    (key := tmp_path / "key").write_bytes(bytes(range(32)))
    key.chmod(0o600)
    serve = ("device", "serve", "--listen", "127.0.0.1:0", "--key-file", str(key))
    with ReadyProcess(
        f"import sys; sys.argv[0] = 'penstock'; {BEGUN}", *serve, "--disk", str(tmp_path)
    ) as run:
        said = [next(run.stdout), next(run.stdout)]
        assert said[1].startswith("near-storage devices at tcp://127.0.0.1:")
        run.send_signal(signal.SIGINT)
        assert run.stdout.read().startswith("ended; ")
        assert (run.wait(), run.errors()) == (0, "")
    assert list(tmp_path.iterdir()) == [key]


def test_while_libraries_are_imported(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGUN, *command(tmp_path)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    check(process.returncode, errors, tmp_path)


@pytest.mark.parametrize("wrapped", [False, True])
def test_where_another_error_is_made_of_it(wrapped: bool) -> None:
    """As by Python 3.11 where a class is made, and by libraries that import it."""
    script = f"""if True:
        from penstock.cli import entry, main

        class Field:
            def __set_name__(self, owner, name):
                raise KeyboardInterrupt

        def app(**_):
            try:
                type("Made", (), {{"field": Field()}})
            except Exception as error:
                if {wrapped}:
                    raise ImportError("it cannot be imported") from error
                raise

        main.app = app
        entry.main()
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (130, 1), done.stderr


def test_another_error_stays_one() -> None:
    assert not entry.is_of_interrupt(ValueError("a"))
    handled = ValueError("b")
    handled.__context__ = KeyboardInterrupt()
    assert not entry.is_of_interrupt(handled)


@pytest.mark.parametrize("where", ["destructor", "weak reference"])
def test_where_python_drops_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in importlib's locks while libraries are imported."""
    monkeypatch.setattr(sys, "unraisablehook", entry.interrupt_again)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)

    class Held:
        def __del__(self) -> None:
            if where == "destructor":
                signal.raise_signal(signal.SIGINT)

    def drop() -> None:
        held = Held()
        watched = weakref.ref(held, lambda _: signal.raise_signal(signal.SIGINT))
        if where == "destructor":
            del watched
        del held
        time.sleep(600)

    try:
        with pytest.raises(KeyboardInterrupt):
            drop()
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("awaited", ["Penstock demo", "prefill  1"])
def test_while_it_loads_and_reads(tmp_path: Path, awaited: str) -> None:
    with ReadyProcess(f"import sys; sys.argv[0] = 'penstock'; {BEGUN}", *command(tmp_path)) as run:
        for line in run.stdout:
            if line.startswith(awaited):
                break
        run.send_signal(signal.SIGINT)
        run.stdout.read()
        check(run.wait(), run.errors(), tmp_path)
