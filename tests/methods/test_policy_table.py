"""Policies of other packages: found by their entry points, used by the command, refused if bad."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import KVSwap
from penstock.cli.main import app
from penstock.core.errors import ConfigError
from penstock.methods import POLICIES, Quest
from penstock.methods.search_space import fields_of, policy_from
from penstock.models.cache_settings import named_policy
from tests.ready_process import ReadyProcess

ACME = Path(__file__).parent / "outside" / "acme_policies.py"
CONTRACT = """
from acme_policies import Spread
from penstock.testing import PolicyContract

class TestSpread(PolicyContract):
    policies = (Spread(weight=0.5, group_tokens=4),)
"""

INHERITED = """
import os, sys
os.environ.pop("PYTEST_ADDOPTS", None)  # such as --shuffle: unknown outside the project's tests
sys.path.insert(0, os.getcwd())
import pytest
sys.exit(pytest.main(sys.argv[1:] + ["test_spread.py"]))
"""

WITHOUT_DEFAULT = """
from dataclasses import dataclass
from penstock import KVSwap

@dataclass(frozen=True, kw_only=True)
class Policy(KVSwap):
    name = "acme-broken"
    more: int
"""


def install(folder: Path, entries: str, package: str = "acme") -> None:
    """What an installer leaves of a package that registers policies."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[penstock.policies]\n{entries}\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of outside packages on the import path."""
    for name in ("acme_policies", "acme_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(ACME, tmp_path)
    return tmp_path


def test_an_outside_policy_is_used_by_its_name(folder: Path) -> None:
    install(folder, "acme-spread = acme_policies:Spread")
    words = ["generate", "recall", "--prompt", "The grass is green . " * 80, "--json"]
    words += ["--policy", "acme-spread", "--memory", "1/2", "--max-new-tokens", "4"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["policy"] == "acme-spread"
    assert document["decode"]["read_bytes"] > 0


def test_an_outside_policy_inherits_the_contract(folder: Path) -> None:
    (folder / "test_spread.py").write_text(CONTRACT)
    with ReadyProcess(INHERITED, "-q", "-p", "no:cacheprovider", folder=folder) as run:
        printed = run.stdout.read()
        assert run.wait() == 0, printed + run.errors()
        assert "11 passed" in printed


def test_a_name_is_imported_when_it_is_asked_for(folder: Path) -> None:
    install(folder, "acme-spread = acme_policies:Spread")
    assert "acme-spread" in POLICIES
    assert "acme-spread" not in list(POLICIES)
    assert POLICIES.find("quest") is POLICIES["quest"] is Quest
    assert "acme_policies" not in sys.modules
    kind = POLICIES["acme-spread"]
    assert kind.__name__ == "Spread"
    assert kind is POLICIES.find("acme-spread")
    policy = named_policy("acme-spread")
    assert policy == kind()
    assert policy_from("acme-spread", {"weight": 0.5}) != policy
    assert fields_of(policy_from("acme-spread", {"weight": 0.5})) == {"weight": 0.5}


def test_an_unknown_name_lists_those_that_are_there(folder: Path) -> None:
    install(folder, "acme-spread = acme_policies:Spread")
    with pytest.raises(ConfigError, match=r"no policy 'magic'; choose from kvswap, .*acme-spread$"):
        POLICIES.find("magic")
    with pytest.raises(KeyError, match="magic"):
        POLICIES["magic"]
    assert POLICIES.get("magic") is None
    assert "magic" not in POLICIES


@pytest.mark.parametrize(
    ("source", "place", "why"),
    [
        (None, "acme_broken:Policy", "ModuleNotFoundError: No module named 'acme_broken'"),
        ("1 / 0", "acme_broken:Policy", "ZeroDivisionError: division by zero"),
        ("raise SystemExit('two\\nlines')", "acme_broken:Policy", "SystemExit: two$"),
        ("", "acme_broken:Policy", "AttributeError: .*no attribute 'Policy'"),
        ("Policy = 1", "acme_broken:Policy", "no class derived from SelectionPolicy"),
        (
            "from penstock.engine.scored_policy import ScoredPolicy as Policy",
            "acme_broken:Policy", "ScoredPolicy lacks score, summarise, summary_bytes",
        ),
        (None, "acme_policies:Spread", "Spread calls itself 'acme-spread'"),
        (
            WITHOUT_DEFAULT,
            "acme_broken:Policy", "TypeError: .*'more'",
        ),
    ],
)  # fmt: skip
def test_a_broken_one_is_told_and_breaks_nothing_else(
    folder: Path, source: str | None, place: str, why: str
) -> None:
    install(folder, f"acme-broken = {place}\nacme-spread = acme_policies:Spread")
    if source is not None:
        (folder / "acme_broken.py").write_text(source)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=f"'acme-broken' of acme .*: {place}: .*{why}"
        ) as told:
            POLICIES.find("acme-broken")
        assert "\n" not in str(told.value)
    assert POLICIES.find("acme-spread").name == "acme-spread"
    assert POLICIES.find("kvswap") is KVSwap
    assert len(list(POLICIES.values())) == len(POLICIES)


def test_a_name_that_is_taken_is_refused(folder: Path) -> None:
    install(folder, "quest = acme_policies:Spread\nacme-spread = acme_policies:Spread")
    install(folder, "acme-spread = acme_policies:Spread", package="other")
    with pytest.raises(ConfigError, match="'quest' of a policy is taken: Penstock and acme have"):
        POLICIES.find("quest")
    with pytest.raises(ConfigError, match=r"(acme and other|other and acme) have one; uninstall"):
        POLICIES["acme-spread"]
    assert POLICIES["quest"] is Quest
    assert POLICIES.find("kvswap") is KVSwap
    assert "acme_policies" not in sys.modules
