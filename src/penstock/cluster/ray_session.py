"""connect(): this process as a driver of a Ray cluster; require_ray(): whether Ray is there."""

from importlib.util import find_spec
from typing import Any

from penstock.core.errors import ConfigError

NAMESPACE = "penstock"
"""Of actors' names."""


def require_ray() -> None:
    """Refuse where Ray is not installed.

    Raises:
        ConfigError: says what to install.
    """
    if find_spec("ray") is None:
        raise ConfigError("ray is not installed, which this needs: pip install 'penstock[cluster]'")


def connect(address: str | None, **local: Any) -> Any:
    """The module `ray`, connected; a second call changes nothing.

    Args:
        address: of a running cluster; None: the one of `RAY_ADDRESS`, or of this machine, as Ray
            finds it. "local" starts one, which ends with this process.
        local: settings of one that is started.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    require_ray()
    import ray

    if ray.is_initialized():
        return ray
    try:
        ray.init(
            address=address or "auto", namespace=NAMESPACE, log_to_driver=False,
            logging_level="ERROR", **local,
        )  # fmt: skip
    except Exception as error:  # Ray raises plain ones too: a node that starts too slowly
        what = "does not start" if address == "local" else "cannot be reached (ray start --head)"
        raise ConfigError(f"Ray {what}: {first_line(error)}") from error
    return ray


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
