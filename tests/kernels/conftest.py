"""What the tests of kernels share."""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _more_than_one_thread() -> Iterator[None]:
    """Kernels divide their work, whatever number of threads the suite runs with."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _language_known() -> Iterator[None]:
    """The interpreter looks through its language once, not at every launch."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    find = interpreter.tl.core.is_builtin
    members = functools.cache(lambda owner: inspect.getmembers(owner, find))

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in members(owner):
            interpreter._patch_attr(owner, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_builtin", patch)
        yield


@pytest.fixture
def bounds_of_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes a loop's bound of an array of one number; numpy 2.4 no longer lets it."""
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_more)
