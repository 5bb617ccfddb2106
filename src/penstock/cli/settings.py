"""Defaults of options, out of the environment and of penstock.toml, by click's own means.

The command line comes first, then the environment (`envvar` of each option), then the file
(click's `default_map`), then the option's own default.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from penstock.core.errors import ConfigError
from penstock.core.regular_file import read_regular_text

FILE_VARIABLE = "PENSTOCK_CONFIG"
"""Environment variable: where the settings file is."""
LOG_LEVEL = "log-level"
GENERAL = frozenset({
    "model", "device", "dtype", "policy", "memory", "disk", "chunk", "max-new-tokens",
    "temperature", "top-p", "top-k", "min-p", "seed", "seal", "library", "key", "offline",
})  # fmt: skip
"""Settings that may stand for all commands that have them."""
OWN_MEANING: Mapping[str, frozenset[str]] = {
    "demo": frozenset({"memory", "policy", "seed"}),
    "devices": frozenset({"disk"}),
    "doc ask": frozenset({"model", "memory", "policy"}),
    "doc verify": frozenset({"model"}),
    "plan": frozenset({"model", "memory", "disk", "policy"}),
    "search": frozenset({"temperature"}),
}
"""Settings that mean something of their own to a command, which takes them by its name alone."""
PER_CALL = frozenset({
    "prompt", "prompt-file", "messages", "raw", "file", "session", "output",
    "force", "name", "title", "trace", "tree", "text", "tables", "save-tables", "repair", "keep",
    "alone", "token", "resume", "revision", "trust-remote-code", "help",
})  # fmt: skip
"""What one call is about; no settings."""
_MOST_BYTES = 1 << 20
_HEADER = re.compile(r"\s*\[\s*([^\]]+?)\s*\]")
_ASSIGNED = re.compile(r"\s*([\w.\"' -]+?)\s*=")


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every command below a group, and its words behind `penstock`."""
    for name, command in group.commands.items():
        path = f"{above} {name}".strip()
        if hasattr(command, "commands"):
            yield from commands(command, path)
        elif not command.hidden:
            yield path, command


def parameters(path: str, command: Any) -> dict[str, Any]:
    """A command's settings by name: its long options, and a model that may be left out."""
    found = {}
    for each in command.params:
        if each.param_type_name == "option":
            name = max(each.opts, key=len).lstrip("-")
        elif each.name == "model" and not each.required:
            name = each.name
        else:
            continue
        if name not in PER_CALL and path != "config":
            found[name] = each
    return found


def is_general(path: str, name: str) -> bool:
    """Whether a command takes a setting that is given for all commands."""
    return name in GENERAL and name not in OWN_MEANING.get(path, ())


def variable(*words: str) -> str:
    """The environment variable of a setting, or of one command's."""
    return "_".join(["penstock", *words]).upper().replace("-", "_").replace(" ", "_")


def name_variables(root: Any) -> None:
    """Give every setting of every command its environment variables, the command's own first."""
    for path, command in commands(root):
        command.path = path
        for name, parameter in parameters(path, command).items():
            if getattr(parameter, "multiple", False):
                continue  # a variable would be split at its blanks
            general = [variable(name)] if is_general(path, name) else []
            parameter.envvar = [variable(path, name), *general]
            parameter.show_envvar = False  # the help would name two for each option


def settings_path() -> Path:
    """Where the file is: PENSTOCK_CONFIG, or the platform's place (~/.config/penstock.toml)."""
    given = os.environ.get(FILE_VARIABLE)
    if given:
        return Path(given)
    return Path(typer.get_app_dir("penstock")).with_name("penstock.toml")


class SettingsFile:
    """The settings of a file, checked against the commands that there are.

    Args:
        path: of the file; one that is missing holds nothing, unless PENSTOCK_CONFIG names it.
        context: of the root command.

    Raises:
        ConfigError: it cannot be read, or something in it is no setting; names the line.
    """

    def __init__(self, path: Path, context: Any) -> None:
        self.path = path
        self._context = context
        self._text = self._read()
        self._commands = dict(commands(context.command))
        self.by_command: dict[str, dict[str, Any]] = {}
        """A command's settings, by the names of its parameters."""
        self.log_level: str | None = None
        try:
            values = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is no TOML: {error}") from error
        tables = {name: value for name, value in values.items() if isinstance(value, dict)}
        self._take_general({name: values[name] for name in values.keys() - tables.keys()})
        for name, table in tables.items():
            self._take_table(name, table)

    @property
    def default_map(self) -> dict[str, Any]:
        """For click's contexts: nested by the words of a command."""
        found: dict[str, Any] = {}
        for path, values in self.by_command.items():
            below = found
            for word in path.split():
                below = below.setdefault(word, {})
            below.update(values)
        return found

    def line_of(self, *keys: str) -> int | None:
        """The line that says what a setting of a command is, in its own table or for all."""
        return self._line(" ".join(keys)) or self._line(keys[-1])

    def _read(self) -> str:
        if str(self.path) == os.devnull:
            return ""
        try:
            return read_regular_text(self.path, _MOST_BYTES)
        except FileNotFoundError as error:
            if os.environ.get(FILE_VARIABLE):
                raise ConfigError(f"{FILE_VARIABLE}: there is no file {self.path}") from error
            return ""
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"cannot read the settings in {self.path}: {reason}") from error

    def _take_general(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            name = key.replace("_", "-")
            if name == LOG_LEVEL:
                levels = {each.name: each for each in self._context.command.params}
                self.log_level = self._checked(self._context, levels["log_level"], (key,), value)
                continue
            takers = [path for path in self._commands if is_general(path, name)]
            takers = [path for path in takers if name in parameters(path, self._commands[path])]
            if not takers:
                raise self._unknown((key,), {*GENERAL, LOG_LEVEL}, "setting for all commands")
            for path in takers:
                self._take(path, (key,), name, value)

    def _take_table(self, path: str, table: Mapping[str, Any]) -> None:
        above = {" ".join(each.split()[:1]) for each in self._commands if " " in each}
        if path not in self._commands and path not in above:
            known = {each.split()[0] for each in self._commands}
            raise self._unknown((path,), known, "command")
        for key, value in table.items():
            if isinstance(value, dict) and f"{path} {key}" in self._commands:
                self._take_table(f"{path} {key}", value)
                continue
            name, command = key.replace("_", "-"), self._commands.get(path)
            known = set() if command is None else set(parameters(path, command))
            if name not in known:
                raise self._unknown((path, key), known, f"setting of penstock {path}")
            self._take(path, (path, key), name, value)

    def _take(self, path: str, keys: tuple[str, ...], name: str, value: Any) -> None:
        command = self._commands[path]
        parameter = parameters(path, command)[name]
        context = type(self._context)(command, info_name=path)
        taken = self._checked(context, parameter, keys, value)
        self.by_command.setdefault(path, {})[parameter.name] = taken

    def _checked(self, context: Any, parameter: Any, keys: tuple[str, ...], value: Any) -> Any:
        """A value as the command line would give it."""
        if getattr(parameter, "is_flag", False):
            if not isinstance(value, bool):
                raise self._wrong(keys, f"{value!r} must be true or false")
            return value
        many = bool(getattr(parameter, "multiple", False))
        items = value if many and isinstance(value, list) else [value]
        if any(isinstance(each, bool | dict | list) for each in items):
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise self._wrong(keys, f"{shown} must be a text or a number")
        words = [str(each) for each in items]
        try:
            read = parameter.process_value(context, words if many else words[0])
        except (typer.BadParameter, ConfigError) as error:
            raise self._wrong(keys, getattr(error, "message", str(error))) from error
        if isinstance(read, int | float) and isinstance(value, str):
            raise self._wrong(keys, f"{value!r} must be a number, without quotes")
        return words if many else words[0]

    def _unknown(self, keys: tuple[str, ...], known: set[str], what: str) -> ConfigError:
        close = difflib.get_close_matches(keys[-1].replace("_", "-"), sorted(known), n=1)
        hint = f"did you mean {close[0]}?" if close else "penstock config lists all"
        return self._wrong(keys, f"there is no such {what}; {hint}")

    def _wrong(self, keys: tuple[str, ...], why: str) -> ConfigError:
        line = self._line(" ".join(keys))
        place = f"{self.path}, line {line}" if line else str(self.path)
        return ConfigError(f"{place}: {'.'.join(' '.join(keys).split())}: {why}")

    def _line(self, words: str) -> int | None:
        """The line on which a key is assigned, or a table begins."""
        words, table = words.replace("_", "-"), ""
        for number, line in enumerate(self._text.splitlines(), start=1):
            if (header := _HEADER.match(line)) is not None:
                table = found = _plain(header[1])
            elif (assigned := _ASSIGNED.match(line)) is not None:
                found = f"{table} {_plain(assigned[1])}".strip()
            else:
                continue
            if found == words:
                return number
        return None


def _plain(key: str) -> str:
    """A dotted key as words."""
    return " ".join(part.strip(" \"'") for part in key.split(".")).replace("_", "-")
