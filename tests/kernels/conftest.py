"""What the tests of kernels share."""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
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
def _quick_interpreter() -> Iterator[None]:
    """Triton's interpreter without what it does over and over, and without what nothing reads."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patched:
        _know_language(interpreter, patched)
        language = SimpleNamespace(__globals__={"core": interpreter.tl.core})
        scope = interpreter._patch_lang(language)  # its own functions see it as `core`
        # It computes each integer sum and product twice; only `debug` would have it look.
        assert not builder.options.debug
        patched.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
        scope.restore()


def _know_language(interpreter: Any, patched: pytest.MonkeyPatch) -> None:
    """The language is looked through once, and patched for a launch, not for each call within it.

    The type of a tensor's shape is made when it is asked for.
    """
    core = interpreter.tl.core
    members = functools.cache(lambda owner: inspect.getmembers(owner, core.is_builtin))
    dtype_of, look_up = interpreter._get_np_dtype, core.tuple.__getattr__
    dtype_of_numbers = functools.cache(dtype_of)

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in members(owner):
            interpreter._patch_attr(owner, name, member, builder, scope)

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def found(kind: Any) -> Any:
        kind = kind.element_ty if isinstance(kind, core.block_type) else kind
        return (dtype_of if isinstance(kind, core.pointer_type) else dtype_of_numbers)(kind)

    def make(values: Any, args: Any, type: Any = None) -> None:
        values.values = [*args]
        if type is not None:
            values.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def attribute(values: Any, name: str) -> Any:
        if name == "type":
            values.type = core._type_for_tuple_values(values.values)
            return values.type
        return look_up(values, name)

    patched.setattr(interpreter, "_patch_builtin", patch)
    patched.setattr(interpreter.InterpretedFunction, "__call__", call)
    patched.setattr(interpreter, "_get_np_dtype", found)
    patched.setattr(core.tuple, "__init__", make)
    patched.setattr(core.tuple, "__getattr__", attribute)


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
