"""What other processes are called, ended ones too."""

import subprocess
import sys
import time

import psutil
import pytest

from penstock.evaluate.process_memory import command_line


@pytest.mark.skipif(sys.platform == "win32", reason="needs processes that wait to be heard of")
def test_a_process_that_has_ended_has_no_command_line() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    while not command_line(process).endswith("input()"):  # as soon as it has been started
        assert process.status() != psutil.STATUS_ZOMBIE
        time.sleep(0.01)
    child.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert command_line(process) == ""
    child.communicate()
    assert command_line(process) == ""
