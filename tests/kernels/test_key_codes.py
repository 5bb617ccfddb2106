"""Codes of keys: what they may be off by, and that every form of the kernels means the same."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock.kernels import key_codes, key_shares
from penstock.kernels.key_codes import DTYPES, FloatArray, KeyCodes
from penstock.kernels.native import compiled
from penstock.testing.pairs import covering

WAYS = ["vectors", "plain C", "numpy"]
UNITS = 70
HEADS = [(1, 1), (8, 8), (8, 1), (8, 4), (8, 2), (16, 2)]
"""Query and KV heads: MHA, MQA, and GQA of 2, 4 and 8."""
bits_of = pytest.mark.parametrize("bits", [8, 4])
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def go(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The form of the kernels that a test names as `way`."""
    if "way" not in request.fixturenames:
        yield
        return
    way = request.getfixturevalue("way")
    if way == "numpy":
        none: Callable[[str], None] = lambda name: None  # noqa: E731
        monkeypatch.setattr(key_codes, "kernel", none)
        monkeypatch.setattr(key_shares, "kernel", none)
    elif compiled.kernel("score_key_codes") is None:
        pytest.skip("kernels were not compiled")
    elif way == "vectors" and compiled.kernel("group_scores") is None:
        pytest.skip("no VNNI here")
    former = compiled.limited_to()
    if way == "plain C":
        compiled.limit("plain")
    yield
    compiled.limit(former)


def keys_of(dtype: str, heads: int, dim: int, units: int = UNITS) -> tuple[FloatArray, Any]:
    """Keys, and units as bytes: keys, then as many bytes of values, then padding."""
    rng = np.random.default_rng(dim + heads)
    keys = rng.normal(size=(units, heads, dim)).astype(np.float32)
    keys += rng.normal(size=(heads, dim)).astype(np.float32) * 3
    keys[1] = 0.0
    keys[2] = 5.0
    keys[3] *= 1e-6
    keys[4, 0, 1] = 60.0
    if dtype == "bfloat16":
        short = (keys.view(np.uint32) >> 16).astype(np.uint16)
        keys = (short.astype(np.uint32) << 16).view(np.float32)
    else:
        short = keys.astype(dtype)
        keys = short.astype(np.float32)
    raw = np.ascontiguousarray(short).reshape(units, -1).view(np.uint8)
    return keys, np.concatenate([raw, np.full((units, raw.shape[1] + 24), 255, np.uint8)], axis=1)


def coded(dtype: str, heads: int, dim: int, bits: int, units: int = UNITS) -> KeyCodes:
    codes = KeyCodes(units, heads, dim, dtype, bits)
    codes.put(np.arange(units), keys_of(dtype, heads, dim, units)[1])
    return codes


@pytest.mark.parametrize(
    ("dim", "dtype", "bits", "way"), covering([32, 64, 80, 128, 200], list(DTYPES), [8, 4], WAYS)
)
def test_codes_are_off_by_what_their_steps_say(dim: int, dtype: str, bits: int, way: str) -> None:
    keys, _ = keys_of(dtype, 3, dim)
    codes = coded(dtype, 3, dim, bits)
    off = np.abs(codes.decoded(np.arange(UNITS)) - keys)
    if bits == 8:
        steps = codes.steps.view(np.float32)
        assert np.allclose(steps[..., 0], np.abs(keys).max(axis=-1) / 127, rtol=1e-6, atol=1e-29)
        assert (off <= 0.5001 * steps).all()
        return
    for first in range(0, dim, 64):
        half = min(64, dim - first) // 2
        for side in range(2):
            part = slice(first + side * half, first + (side + 1) * half)
            word = codes.steps[..., first // 32 + side]
            step, least = (word << 16).view(np.float32), (word & 0xFFFF0000).view(np.float32)
            spread = keys[..., part].max(axis=-1) - keys[..., part].min(axis=-1)
            slack = np.abs(least) / 256
            assert (step <= (spread + slack) / 15 * 1.004 + 1e-29).all()
            bound = np.maximum(0.5001 * step, slack * 1.01)
            assert (off[..., part] <= bound[..., None]).all()


@pytest.mark.parametrize(
    ("dim", "dtype", "bits", "way"), covering([32, 80, 128], list(DTYPES), [8, 4], WAYS)
)
def test_putting_means_the_same(dim: int, dtype: str, bits: int, way: str) -> None:
    codes = coded(dtype, 2, dim, bits)
    plain = KeyCodes(UNITS, 2, dim, dtype, bits)
    plain.put_twin(np.arange(UNITS), keys_of(dtype, 2, dim)[1])
    assert (codes.codes == plain.codes).all()
    assert (codes.steps == plain.steps).all()


def one_query(heads: int, dim: int) -> tuple[FloatArray, FloatArray, float]:
    rng = np.random.default_rng(heads)
    query = rng.normal(size=(heads, dim)).astype(np.float32) * 2
    return query, rng.normal(size=heads).astype(np.float32) * 3 + 12, dim**-0.5


@pytest.mark.parametrize(
    ("shape", "dim", "bits", "way"), covering(HEADS, [32, 64, 80, 128, 200], [8, 4], WAYS)
)
def test_scores_mean_the_same(shape: tuple[int, int], dim: int, bits: int, way: str) -> None:
    heads, kv_heads = shape
    codes = coded("bfloat16", kv_heads, dim, bits)
    query, normalisers, scaling = one_query(heads, dim)
    rng = np.random.default_rng(1)
    keys = codes.decoded(np.arange(UNITS)).astype(np.float64)
    logits = np.einsum("hgd,nhd->hgn", query.reshape(kv_heads, -1, dim), keys).reshape(heads, -1)
    shares = np.exp(logits * scaling - normalisers[:, None]).sum(axis=0)
    lengths = np.abs(keys).sum(axis=(1, 2))  # half a step of the query off in every channel
    off = np.abs(query).max(axis=1) / 254
    for count in (0, 1, 15, 16, 33, UNITS):
        units = rng.permutation(UNITS)[:count].astype(np.int64)
        for given, exact in ((None, logits.sum(axis=0)), (normalisers, shares)):
            prepared = codes.prepare(query, given, scaling)
            out, plain = np.full((2, count), np.nan, dtype=np.float32)
            codes.score_prepared(prepared, units, out)
            codes.score_twin(prepared, units, plain)
            np.testing.assert_allclose(out, plain, rtol=2e-4, atol=1e-3 if given is None else 1e-7)
            if given is None:
                bound = lengths[units] * off.max() * heads * 1.01 + 1e-2
                assert (np.abs(out - exact[units]) <= bound).all()
            else:
                factor = np.exp(lengths[units] * off.max() * scaling * 1.01) * 1.001
                assert (out <= exact[units] * factor).all()
                assert (out >= exact[units] / factor).all()


@each_way
@bits_of
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 4, 64), (4, 4, 80), (16, 2, 128)])
def test_two_rounds_are_one(heads: int, kv_heads: int, dim: int, bits: int, way: str) -> None:
    codes = coded("float16", kv_heads, dim, bits)
    query, normalisers, scaling = one_query(heads, dim)
    prepared = codes.prepare(query, normalisers, scaling)
    for count in (0, 1, 37):
        units = np.arange(UNITS)[::-1][:count].astype(np.int64)
        logits, plain = np.full((2, heads, count), np.nan, dtype=np.float32)
        sums = codes.logits(prepared, units, logits)
        plain_sums = codes.logits_twin(prepared, units, plain)
        np.testing.assert_allclose(logits, plain, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(sums, plain_sums, rtol=1e-5, atol=1e-4)
        whole = np.array([np.logaddexp.reduce(row, initial=-np.inf) for row in logits])
        np.testing.assert_allclose(sums, whole, rtol=1e-5, atol=1e-5)
        at_once, in_two = np.full((2, count), np.nan, dtype=np.float32)
        codes.score_prepared(prepared, units, at_once)
        key_codes_shares(logits, normalisers, in_two)
        np.testing.assert_allclose(in_two, at_once, rtol=1e-4)


def key_codes_shares(logits: FloatArray, normalisers: FloatArray, out: FloatArray) -> None:
    """`add_shares`, which must be what its twin is."""
    key_shares.add_shares(logits, normalisers, out)
    plain = np.empty_like(out)
    key_shares.add_shares_twin(logits, normalisers, plain)
    np.testing.assert_allclose(out, plain, rtol=1e-5)


@each_way
def test_exponentials(way: str) -> None:
    """Against doubles, from where they vanish to where they are cut off."""
    x = np.linspace(-87, 80, 300_001, dtype=np.float32)
    out = np.empty_like(x)
    key_shares.add_shares(x[None], np.zeros(1, dtype=np.float32), out)
    exact = np.exp(x.astype(np.float64))
    most = 3 if way == "numpy" else 2
    assert (np.abs(out - exact) <= most * np.spacing(exact.astype(np.float32))).all()
    codes, none = coded("float32", 1, 64, 8), np.zeros((1, 64), dtype=np.float32)
    for place in range(0, len(x), 200):  # the kernel of scores has its own
        codes.score(none, -x[place : place + 1], 1.0, np.array([0]), out[:1])
        assert abs(out[0] - exact[place]) <= most * np.spacing(np.float32(exact[place]))
    ends = np.array([[-1e30, -87.1, 80.0, 81.0, 1e30]], dtype=np.float32)
    out = np.empty(5, dtype=np.float32)
    key_shares.add_shares(ends, np.zeros(1, dtype=np.float32), out)
    assert out[:2].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(out[2:], np.exp(80.0), rtol=1e-6)


@bits_of
@pytest.mark.parametrize("way", WAYS[:2])
def test_exponents_of_scores_are_clamped(bits: int, way: str) -> None:
    codes = coded("float32", 2, 64, bits)
    query, normalisers, _ = one_query(4, 64)
    units, out = np.arange(UNITS), np.empty(UNITS, dtype=np.float32)
    codes.score(query, normalisers - 1e6, 1.0, units, out)
    np.testing.assert_allclose(out, 4 * np.exp(80.0), rtol=1e-6)
    codes.score(query, normalisers + 1e6, 1.0, units, out)
    assert (out == 0.0).all()


@each_way
@bits_of
def test_threads_do_not_change_anything(bits: int, way: str) -> None:
    units = 3001
    one, two = (KeyCodes(units, 2, 64, "bfloat16", bits) for _ in range(2))
    raw = keys_of("bfloat16", 2, 64, units)[1]
    order = np.random.default_rng(0).permutation(units)
    one.put(order, raw, threads=1)
    two.put(order, raw, threads=2)
    assert (one.codes == two.codes).all()
    assert (one.steps == two.steps).all()
    query, normalisers, scaling = one_query(8, 64)
    for given in (None, normalisers):
        found = []
        for threads in (1, 2, 0):
            out = np.empty(units, dtype=np.float32)
            one.score(query, given, scaling, order, out, threads=threads)
            found.append(out)
        assert (found[0] == found[1]).all()
        assert (found[0] == found[2]).all()
    prepared = one.prepare(query, normalisers, scaling)
    both = []
    for threads in (1, 2):
        logits, shares = np.empty((8, units), dtype=np.float32), np.empty(units, dtype=np.float32)
        sums = one.logits(prepared, order, logits, threads)
        key_shares.add_shares(logits, normalisers, shares, threads)
        both.append((logits, sums, shares))
    assert all((a == b).all() for a, b in zip(*both, strict=True))


@bits_of
def test_growing_keeps_codes_and_the_ledger_is_right(bits: int) -> None:
    codes = coded("float16", 2, 80, bits)
    before = codes.codes.copy(), codes.steps.copy()
    codes.grow(UNITS + 30)
    assert codes.num_units == UNITS + 30
    assert (codes.codes[:UNITS] == before[0]).all()
    assert (codes.steps[:UNITS] == before[1]).all()
    held = codes.codes.nbytes + codes.steps.nbytes + 2 * 64
    assert held == KeyCodes.num_bytes(UNITS + 30, 2, 80, bits)
    codes.put(np.array([UNITS + 29]), keys_of("float16", 2, 80)[1][:1])
    assert (codes.codes[-1] == before[0][0]).all()
    assert codes.codes.ctypes.data % 64 == codes.steps.ctypes.data % 64 == 0
    with pytest.raises(ValueError, match="cannot become"):
        codes.grow(UNITS)


@each_way
@bits_of
def test_what_does_not_fit_is_refused(bits: int, way: str) -> None:
    codes = coded("bfloat16", 2, 64, bits)
    raw = keys_of("bfloat16", 2, 64)[1]
    query, normalisers, scaling = one_query(4, 64)
    out = np.empty(1, dtype=np.float32)
    for unit in (-1, UNITS):
        for call in (
            lambda at: codes.put(at, raw[:1]),
            lambda at: codes.score(query, None, scaling, at, out),
            lambda at: codes.logits(
                codes.prepare(query, normalisers, scaling), at, np.empty((4, 1), np.float32)
            ),
            codes.decoded,
        ):
            with pytest.raises(ValueError, match="not all among"):
                call(np.array([unit]))
    for bytes_of_row in (raw[:1, :255], raw[:2], raw[0]):
        with pytest.raises(ValueError, match="do not come from"):
            codes.put(np.array([0]), bytes_of_row)
    unfit: list[Any] = [out[:0], out.astype(np.float64), np.empty((1, 1), np.float32)]
    for target in unfit:
        with pytest.raises(ValueError, match="does not go into"):
            codes.score(query, None, scaling, np.array([0]), target)
    for wrong in (query[:3], query[:, :32], query[:0]):
        with pytest.raises(ValueError, match="a query of shape"):
            codes.prepare(wrong, None, scaling)
    with pytest.raises(ValueError, match="normalisers of shape"):
        codes.prepare(query, normalisers[:2], scaling)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="not finite"):
            codes.prepare(query, np.full(4, bad, dtype=np.float32), scaling)
        with pytest.raises(ValueError, match="not finite"):
            codes.prepare(query * np.float32(bad), None, scaling)
    other = KeyCodes(1, 2, 64, "bfloat16", 12 - bits)
    with pytest.raises(ValueError, match="another kind"):
        other.score_prepared(codes.prepare(query, None, scaling), np.array([0]), out)


@pytest.mark.parametrize(
    ("bad", "dtype", "bits", "way"),
    covering([np.nan, np.inf, -np.inf], list(DTYPES), [8, 4], WAYS),
)
def test_keys_that_are_no_numbers_are_refused(bad: float, dtype: str, bits: int, way: str) -> None:
    raw = keys_of(dtype, 2, 64)[1][:3].copy()
    value = np.array([bad], dtype=np.float32)
    encoded = (
        (value.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16"
        else value.astype(dtype)
    ).view(np.uint8)  # fmt: skip
    raw[1, 5 * len(encoded) : 6 * len(encoded)] = encoded
    codes = KeyCodes(UNITS, 2, 64, dtype, bits)
    with pytest.raises(ValueError, match="keys of 1 units"):
        codes.put(np.array([4, 5, 6]), raw)


def test_other_kinds_are_refused() -> None:
    for dim, dtype, bits, match in (
        (64, "bfloat16", 5, "5 bits"), (64, "int8", 8, "keys in int8"), (65, "float16", 4, "even"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            KeyCodes(4, 1, dim, dtype, bits)
    assert KeyCodes(4, 1, 65, "float16", 8).decoded(np.arange(4)).shape == (4, 1, 65)


def test_it_does_without_torch() -> None:
    """The near-storage device imports it."""
    code = "import sys, penstock.kernels.key_codes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
