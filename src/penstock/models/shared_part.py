"""SharedPart: a change of a model that several caches need, made once and undone by the last."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

_PARTS = "_penstock_parts"

Undo = Callable[[], None]


class _Parts:
    """All changes of one model, each with its users; lies on the model while there are any."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0
        self._left: deque[str] = deque()
        self._parts: dict[str, tuple[int, Undo]] = {}

    def __deepcopy__(self, memo: object) -> "_Parts":
        return _Parts()  # a model that was copied just now is not in use

    @contextmanager
    def hold(self, model: PreTrainedModel) -> Iterator[None]:
        """Alone with the model's parts; who leaves meanwhile is heard at the end."""
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                try:
                    while self._left:
                        self._drop(self._left.popleft())
                finally:
                    if not self._parts and model.__dict__.get(_PARTS) is self:
                        del model.__dict__[_PARTS]
                    self._owner = 0

    def take(self, name: str, make: Callable[[], Undo]) -> None:
        """One user more."""
        count, undo = self._parts[name] if name in self._parts else (0, make())
        self._parts[name] = count + 1, undo

    def leave(self, model: PreTrainedModel, name: str) -> None:
        """One user less. A collector may say so within `hold`, in the very thread."""
        self._left.append(name)
        while self._left and self._owner != threading.get_ident():
            with self.hold(model):
                pass

    def _drop(self, name: str) -> None:
        count, undo = self._parts.pop(name)
        if count > 1:
            self._parts[name] = count - 1, undo
        else:
            undo()


class SharedPart:
    """One user's hold on a change of a model; safe to take and to leave in any thread."""

    def __init__(self, model: PreTrainedModel, name: str, make: Callable[[], Undo]) -> None:
        """Make the change, unless another user has.

        Args:
            name: of the change.
            make: makes it, and returns what undoes it.
        """
        self._name = name
        while True:
            self._parts: _Parts = model.__dict__.setdefault(_PARTS, _Parts())
            with self._parts.hold(model):
                if model.__dict__.get(_PARTS) is self._parts:
                    self._parts.take(name, make)
                    break
        self._model: PreTrainedModel | None = model

    def leave(self) -> None:
        """The last user undoes the change; a second call does nothing."""
        model, self._model = self._model, None
        if model is not None:
            self._parts.leave(model, self._name)
