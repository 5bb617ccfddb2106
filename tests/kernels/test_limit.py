"""How much of the compiled kernels may be used: compiled.limit(), and that there are kernels."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from penstock.kernels.native import compiled

ROOT = Path(__file__).parents[2]
PLAIN, VECTORS, BYTES = "copy_runs", "rms_norm", "group_scores"
FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "auto": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The suite's own limit comes back."""
    former = compiled.limited_to()
    yield
    compiled.limit(former)


def hatch_build() -> ModuleType:
    """The build hook, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def processor_flags() -> set[str] | None:
    """What Linux says that an x86 processor can do; None elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((set(line.split()) for line in lines if line.startswith("flags")), None)


def offered() -> set[str]:
    return {name for name in compiled._SIGNATURES if compiled.kernel(name) is not None}


def test_where_a_compiler_is_every_kernel_of_the_processor_is_used() -> None:
    """Everything else skips without kernels, so that a failed build must fail here."""
    compiler = hatch_build().find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    compiled.limit("auto")
    flags = processor_flags()
    if flags is None:
        assert compiled.kernel(PLAIN) is not None, f"{compiler} made no kernels that can be loaded"
        return
    expected = {
        name for name in compiled._SIGNATURES
        if FLAGS.get(compiled.LEVELS[compiled._NEEDS.get(name, 0)], set()) <= flags
    }  # fmt: skip
    assert offered() == expected, f"{compiler} made no kernels that can be loaded"


@pytest.mark.skipif(compiled._load(compiled._FOLDER / compiled.file_name()) is None, reason="none")
def test_each_level_has_the_kernels_of_the_one_below() -> None:
    found = []
    for level in compiled.LEVELS:
        compiled.limit(level)
        assert compiled.limited_to() == level
        found.append(offered())
    off, plain, avx512, auto = found
    assert off == set()
    assert PLAIN in plain
    assert plain <= avx512 <= auto
    assert not {VECTORS, BYTES} & plain
    assert BYTES not in avx512


def test_an_unknown_level_is_refused_and_changes_nothing() -> None:
    compiled.limit("plain")
    before = compiled.limited_to()
    with pytest.raises(ValueError, match="'avx2'; give off, plain, avx512 or auto"):
        compiled.limit("avx2")
    assert compiled.limited_to() == before


def test_the_build_says_why_there_are_no_kernels(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = hatch_build()
    for name in ("compiled.py", "kernels.h"):
        (tmp_path / name).write_bytes((compiled._FOLDER / name).read_bytes())
    (tmp_path / "wrong.c").write_text("#error no such thing\n")
    monkeypatch.setattr(hook, "find_compiler", lambda: None)
    assert hook.compile_kernels(tmp_path) is None
    assert "no C compiler" in capfd.readouterr().err
    monkeypatch.undo()
    if hook.find_compiler() is not None:
        assert hook.compile_kernels(tmp_path) is None
        assert "no such thing" in capfd.readouterr().err
    assert not list(tmp_path.glob("kernels.*o*")), "nothing half made is left"
