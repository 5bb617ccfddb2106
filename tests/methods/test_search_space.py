"""Every choice of every policy is one of its fields, and every setting of it can run."""

import json
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.engine.head_rows import HeadRows
from penstock.methods import POLICIES, KVSwap, SelectionPolicy
from penstock.methods.baselines.infinigen import InfiniGenStarReuse
from penstock.methods.baselines.pqcache import PQCache
from penstock.methods.search_space import fields_of, policy_from, settings_of

SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32)
AMPLE_BYTES = 1 << 30
TOKENS = 4096
MOST = {"kvswap": 500}
"""Settings of a policy at most, where it is not 35."""
FORGETFUL = {"snapkv", "h2o", "raas", "streaming_llm"}

each_policy = pytest.mark.parametrize("name", POLICIES)


@cache
def settings(name: str) -> tuple[SelectionPolicy, ...]:
    return tuple(settings_of(POLICIES[name]))


def request_for(policy: SelectionPolicy) -> SizingRequest:
    rows = HeadRows(SHAPE, per_head=policy.per_head)
    return SizingRequest(
        shape=rows.shape, batch=rows.per_sequence, max_tokens=TOKENS, limit_bytes=AMPLE_BYTES,
        sector_bytes=512, device_is_cpu=True, has_adapter=True,
        rows_per_sequence=rows.per_sequence,
    )  # fmt: skip


@each_policy
def test_choices_are_fields(name: str) -> None:
    known = {field.name for field in fields(POLICIES[name])}
    chosen = [choice.field for choice in POLICIES[name].choices]
    assert set(chosen) <= known
    assert len(set(chosen)) == len(chosen)
    assert all(choice.meaning for choice in POLICIES[name].choices)


@each_policy
def test_every_setting_is_another_and_every_value_is_in_one(name: str) -> None:
    found = settings(name)
    assert 1 <= len(found) <= MOST.get(name, 35)
    assert len(set(found)) == len(found)
    assert {type(setting) for setting in found} == {POLICIES[name]}
    for choice in POLICIES[name].choices:
        assert {getattr(setting, choice.field) for setting in found} == set(choice.values)
    assert (len(found) > 1) == bool(POLICIES[name].choices)


@each_policy
def test_every_setting_fits_an_ample_budget(name: str) -> None:
    chosen = {choice.field for choice in POLICIES[name].choices}
    for setting in settings(name):
        policy, plan = setting.plan(request_for(setting))
        assert plan.total_bytes <= AMPLE_BYTES
        for field in chosen:
            value = getattr(setting, field)
            if value is not None and field != "rank":  # narrow models have fewer components
                assert getattr(policy, field) == value, "the plan changed what was chosen"
        if setting.retrieves and setting.repeats_another:
            pytest.fail(f"{setting} repeats another")


@each_policy
def test_settings_survive_as_plain_data(name: str) -> None:
    for setting in settings(name):
        document = json.loads(json.dumps(fields_of(setting)))
        assert policy_from(name, document) == setting
    assert fields_of(POLICIES[name]()) == {}


def test_who_has_which_choices() -> None:
    assert {name for name in POLICIES if not POLICIES[name].choices} == {"full", "flexgen"}
    for name in FORGETFUL:
        assert [choice.field for choice in POLICIES[name].choices] == ["selected_tokens"]
    assert len(settings("kvswap")) == 5 * 11 * 7


def test_repeated_settings_are_left_out() -> None:
    reuse = [(each.selected_tokens, each.reuse_tokens) for each in settings("infinigen-star-reuse")
             if isinstance(each, InfiniGenStarReuse)]  # fmt: skip
    assert (800, 800) not in reuse
    assert (400, 800) in reuse
    parts = {(each.subvectors, each.bits) for each in settings("pqcache")
             if isinstance(each, PQCache)}  # fmt: skip
    assert (None, None) in parts
    assert (8, 6) in parts
    assert not {(None, 8), (8, None)} & parts


def test_what_a_policy_object_fixes_stays() -> None:
    fixed = KVSwap(group_tokens=8, reuse_tokens=300, window_tokens=32)
    found = list(settings_of(fixed))
    assert len(found) == 3 * 4 * 3
    for each in found:
        assert isinstance(each, KVSwap)
        assert (each.group_tokens, each.reuse_tokens, each.window_tokens) == (8, 300, 32)
    assert len(list(settings_of(KVSwap(window_tokens=32)))) == len(settings("kvswap"))


def test_impossible_combinations_are_left_out() -> None:
    found = list(settings_of(KVSwap(group_tokens=300)))
    assert {each.selected_tokens for each in found if isinstance(each, KVSwap)} == {800, 400}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("magic", {}, "there is no policy 'magic'"),
        ("kvswap", {"groups": 4}, "kvswap has no field 'groups'; it has group_tokens"),
        ("full", {"rank": 4}, "full has no field 'rank'; it has none at all"),
        ("kvswap", {"group_tokens": "4"}, "kvswap: group_tokens='4' is no value"),
        ("kvswap", {"group_tokens": 4.5}, "kvswap: group_tokens=4.5 is no value"),
        ("kvswap", {"group_tokens": True}, "group_tokens=True is no value"),
        ("kvswap", {"index_bits": 5}, "index_bits=5 is no value"),
        ("kvswap", {"group_tokens": 0}, "kvswap: group_tokens=0 must be at least 1"),
        ("louiskv", {"tau": 2}, "louiskv: tau=2 is a cosine"),
        ("kvswap", {"name": "quest"}, "kvswap has no field 'name'"),
    ],
)
def test_bad_plain_data_is_refused(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_from(name, given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
