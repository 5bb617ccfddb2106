"""Settings of a run of any kind, told apart by a table that only one kind has."""

import tomllib
from pathlib import Path

from penstock.core.errors import ConfigError
from training.prose_settings import ProseSettings, prose_settings
from training.settings import Settings, read_settings, read_strictly
from training.video_settings import VideoSettings, video_settings

AnySettings = Settings | ProseSettings | VideoSettings


def read_run_settings(path: str | Path) -> AnySettings:
    """Read a TOML file; one with `[corpus]` is of a prose run, one with `[vision]` of clips.

    Raises:
        ConfigError: the file cannot be read, or a setting is missing, unknown or impossible.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if "corpus" in tables:
        return read_strictly(path, prose_settings)
    if "vision" in tables:
        return read_strictly(path, video_settings)
    return read_settings(path)
