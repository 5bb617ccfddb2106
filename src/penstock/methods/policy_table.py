"""PolicyTable: methods by name, Penstock's own and those that other packages register."""

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.engine.policy import SelectionPolicy

GROUP = "penstock.policies"
"""Entry points of other packages: a policy's name, and where its class is."""


class PolicyTable(Mapping[str, type[SelectionPolicy]]):
    """Policy classes by name.

    It iterates over Penstock's own, so that what runs over all of them is the same on every
    machine. Names that other packages register are found besides. Their code is imported when the
    name is asked for, and no sooner.
    """

    def __init__(self, own: Iterable[type[SelectionPolicy]]) -> None:
        self._own = {policy.name: policy for policy in own}

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    @override
    def __len__(self) -> int:
        return len(self._own)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._own or name in _registered().names

    @override
    def __getitem__(self, name: str) -> type[SelectionPolicy]:
        """As `find`, but Penstock's own is what a name means that another package takes too.

        Raises:
            KeyError: there is no policy of that name.
            ConfigError: the registered one cannot be used.
        """
        if name in self._own:
            return self._own[name]
        if name not in self:
            raise KeyError(name)
        return self.find(name)

    def find(self, name: str) -> type[SelectionPolicy]:
        """The policy that a user named.

        Raises:
            ConfigError: there is none, several have the name, or the registered one cannot be used.
        """
        entries = list(_registered().select(name=name))
        claims = ["Penstock"] * (name in self._own) + [_package(entry) for entry in entries]
        if len(claims) > 1:
            raise ConfigError(
                f"the name {name!r} of a policy is taken: {' and '.join(claims)} have one; "
                f"uninstall {claims[-1]}, or give its policy object instead of the name"
            )
        if name in self._own:
            return self._own[name]
        if not entries:
            known = [*self._own, *sorted(_registered().names - self._own.keys())]
            raise ConfigError(f"there is no policy {name!r}; choose from {', '.join(known)}")
        return _loaded(entries[0])


def _registered() -> EntryPoints:
    """What is installed in the folders of the import path as it is now."""
    return _registered_in(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _registered_in(path: tuple[str, ...]) -> EntryPoints:
    # The files of every installed package are read: a document that is opened has time for better.
    return entry_points(group=GROUP)


def _package(entry: EntryPoint) -> str:
    return "a package without a name" if entry.dist is None else entry.dist.name


def _loaded(entry: EntryPoint) -> type[SelectionPolicy]:
    """The class that an entry point names.

    Raises:
        ConfigError: it cannot be imported, or is no policy of that name.
    """
    try:
        found = entry.load()
        why = _refusal(found, entry.name)
    except (Exception, SystemExit) as error:  # whatever another package's code raises
        first_line = str(error).split("\n")[0]
        raise _unusable(entry, f"{type(error).__name__}: {first_line}") from error
    if why:
        raise _unusable(entry, why)
    policy: type[SelectionPolicy] = found
    return policy


def _refusal(found: object, name: str) -> str:
    """Why an object is no policy class of that name; empty where it is one."""
    if not (isinstance(found, type) and issubclass(found, SelectionPolicy)):
        return "that is no class derived from SelectionPolicy"
    if inspect.isabstract(found):
        return f"{found.__name__} lacks {', '.join(sorted(found.__abstractmethods__))}"
    if getattr(found, "name", None) != name:
        return f"{found.__name__} calls itself {getattr(found, 'name', None)!r}"
    found()  # every field has a default
    return ""


def _unusable(entry: EntryPoint, why: str) -> ConfigError:
    return ConfigError(
        f"the policy {entry.name!r} of {_package(entry)} cannot be used: {entry.value}: {why}"
    )
