"""A policy's settings: those worth trying, and a policy as plain data and back."""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, get_type_hints

from penstock.core.errors import ConfigError
from penstock.core.plain_data import fits
from penstock.methods import POLICIES, SelectionPolicy


def settings_of(policy: type[SelectionPolicy] | SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Every combination of a policy's `choices` that is possible, each once.

    Args:
        policy: a class; or an object, of which fields that are not at their default stay what they
            are and only the others are chosen.

    Yields:
        In the order of the product: the values of the last choice change fastest. A policy without
        choices gives itself.
    """
    base = policy if isinstance(policy, SelectionPolicy) else policy()
    fixed = fields_of(base)
    open_choices = [choice for choice in base.choices if choice.field not in fixed]
    chooses_all = len(open_choices) == len(base.choices)
    seen: set[SelectionPolicy] = set()
    for values in product(*(choice.values for choice in open_choices)):
        chosen: dict[str, Any] = {
            choice.field: value for choice, value in zip(open_choices, values, strict=True)
        }
        try:
            setting = dataclasses.replace(base, **chosen)
        except ConfigError:
            continue
        # What one setting repeats of another may be one that a fixed field rules out.
        if setting in seen or (chooses_all and setting.repeats_another):
            continue
        seen.add(setting)
        yield setting


def fields_of(policy: SelectionPolicy) -> dict[str, Any]:
    """The fields of a policy that differ from their defaults, as plain data for JSON."""
    default = type(policy)()
    return {
        field.name: getattr(policy, field.name)
        for field in dataclasses.fields(policy)
        if getattr(policy, field.name) != getattr(default, field.name)
    }


def policy_from(name: str, fields: Mapping[str, Any]) -> SelectionPolicy:
    """The policy of a name with fields as `fields_of` gave them; the rest have their defaults.

    Raises:
        ConfigError: there is no usable policy or field of that name, or a value makes no sense.
    """
    kind = POLICIES.find(name)
    hints = get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    for field, value in fields.items():
        if field not in known:
            raise ConfigError(
                f"{name} has no field {field!r}; it has {', '.join(known) or 'none at all'}"
            )
        if not fits(value, hints[field]):
            raise ConfigError(f"{name}: {field}={value!r} is no value of that field")
    try:
        return kind(**fields)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
