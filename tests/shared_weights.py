"""read_once(): a model's weights are read once for many commands in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from penstock.models import loader

BUNDLED = (Path(loader.__file__).parent / loader.BUNDLED).resolve()
_configs: dict[Path, Any] = {}
_models: dict[tuple[Path, Any], Any] = {}
_checked, _read = loader._checked_config, loader._read


@contextmanager
def read_once(*folders: Path) -> Iterator[None]:
    """Within it, each load of the bundled model has the same weights, which stay as they are, and
    all else of it anew.

    Args:
        folders: of other models that this goes for.
    """
    others = {folder.resolve() for folder in folders}

    def config_of(folder: Path, name: str, *, own_code: bool) -> Any:
        place = folder.resolve()
        if own_code or place not in (BUNDLED, *others):
            return _checked(folder, name, own_code=own_code)
        if place not in _configs:
            _configs[place] = _checked(folder, name, own_code=own_code)
        return deepcopy(_configs[place])

    def model_of(folder: Path, config: Any, dtype: Any, *, own_code: bool) -> Any:
        place = folder.resolve()
        if own_code or place not in (BUNDLED, *others):
            return _read(folder, config, dtype, own_code=own_code)
        if (place, dtype) not in _models:
            _models[place, dtype] = _read(folder, config, dtype, own_code=own_code)
        return _models[place, dtype]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_checked_config", config_of)
        patch.setattr(loader, "_read", model_of)
        yield
    for place, dtype in [known for known in _models if known[0] in others]:
        del _models[place, dtype]
    for place in others:
        _configs.pop(place, None)
