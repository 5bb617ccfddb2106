"""The pages say what is there: the README is short, targets and commands exist, links lead on.

What the pages' examples do is in `test_examples.py`, and their figures are in `test_figures.py`.
"""

import re
import runpy
import unicodedata
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

TOP = Path(__file__).parents[1]
README = TOP / "README.md"
README_BYTES_MAX = 8192
DOCS = TOP / "docs"
PATTERNS = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "training/*.md", "research/**/*.md")
PAGES = [path for pattern in PATTERNS for path in sorted(TOP.glob(pattern))]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def commands(path: Path, program: str) -> list[list[str]]:
    """The words of every command of a page's console blocks that calls `program`."""
    text = "\n".join(BLOCK.findall(path.read_text())).replace("\\\n", " ")
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    return [words for words in lines if words[:1] == [program]]


def test_the_readme_is_short_and_begins_with_demo_and_test() -> None:
    text = README.read_bytes()
    assert len(text) <= README_BYTES_MAX
    assert commands(README, "make")[:2] == [["make", "demo"], ["make", "test"]]
    assert text.index(b"make test") < 800


def test_contributing_shows_a_whole_policy() -> None:
    text = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    quest = TOP / "src" / "penstock" / "methods" / "baselines" / "quest.py"
    assert f"```python\n{quest.read_text(encoding='utf-8')}```\n" in text, "copy the file anew"
    assert len(text.encode()) <= README_BYTES_MAX


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (TOP / "Makefile").read_text(), re.MULTILINE)
    named = {word for page in PAGES for words in commands(page, "make") for word in words[1:]}
    assert {word for word in named if "=" not in word} - set(targets) == set()


def test_the_pages_show_every_command() -> None:
    from penstock.cli.main import app

    pages = [README, *DOCS.glob("**/*.md")]
    named = {words[1] for page in pages for words in commands(page, "penstock")}
    groups = {
        group.typer_instance.info.name
        for group in app.registered_groups
        if group.typer_instance is not None
    }
    assert named == groups | {command.name for command in app.registered_commands}


def test_the_reference_of_commands_is_what_they_say() -> None:
    tool: dict[str, Any] = runpy.run_path(str(DOCS / "tools" / "commands.py"))
    written = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    assert written == tool["page"](), "it is stale: run python docs/tools/commands.py"


def test_the_drawing_of_the_ladder_is_of_the_one_that_holds() -> None:
    tool: dict[str, Any] = runpy.run_path(str(DOCS / "tools" / "ladder.py"))
    drawn = (DOCS / "images" / "ladder.svg").read_text(encoding="utf-8")
    assert drawn == tool["drawing"](tool["rungs"]()), "it is stale: run python docs/tools/ladder.py"


def test_architecture_is_short_and_so_are_its_walks() -> None:
    text = (TOP / "ARCHITECTURE.md").read_text()
    assert len(text.encode()) <= README_BYTES_MAX
    walks = text.split("\n## ")[2:4]
    assert all(".py`" in walk for walk in walks)
    assert [len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 8 for walk in walks] == [True] * 2


def test_files_and_folders_that_pages_name_exist() -> None:
    """Below the repository or below the package, as `engine/policy.py` is."""
    below = (TOP, TOP / "src" / "penstock")
    named = {
        (page.name, name)
        for page in [README, TOP / "ARCHITECTURE.md", TOP / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
        for name in re.findall(r"`((?:[\w-]+/)+(?:[\w-]+\.\w+)?)`", page.read_text())
    }
    assert len(named) > 50
    assert {each for each in named if not any((top / each[1]).exists() for top in below)} == set()


def in_nav(entries: list[Any]) -> list[str]:
    """The pages of a part of the site's nav, in their order."""
    found: list[str] = []
    for entry in entries:
        below = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += in_nav(below) if isinstance(below, list) else [below]
    return found


def test_the_nav_of_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((TOP / "mkdocs.yml").read_text())
    pages = {str(path.relative_to(DOCS)) for path in DOCS.glob("**/*.md")}
    nav = in_nav(site["nav"])
    outside = [page for page in nav if page.startswith("repository/")]
    assert sorted(set(nav) - set(outside)) == sorted(pages - set(site["not_in_nav"].split()))
    assert len(set(nav)) == len(nav)
    assert all((TOP / page.removeprefix("repository/")).exists() for page in outside)


def test_notes_are_one_topic_a_file_and_in_their_index() -> None:
    notes = TOP / "research" / "notes"
    files = {path.name for path in notes.glob("*.md")} - {"README.md"}
    assert {
        name for name in files if not re.match(r"2026-\d\d-\d\d-[a-z0-9-]+\.md$", name)
    } == set()
    assert set(re.findall(r"\]\(([^)]+\.md)\)", (notes / "README.md").read_text())) >= files


def test_links_lead_somewhere() -> None:
    assert README in PAGES
    assert [
        f"{path.name}: {target}"
        for path in PAGES
        for target in re.findall(r"\]\(([^)#]+)", path.read_text())
        if not target.startswith("http") and not (path.parent / target).exists()
    ] == []


def test_places_in_pages_exist() -> None:
    """A link to a heading names one that is there, as GitHub and as the site spell it."""

    def headings(path: Path) -> set[str]:
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        return {on_github(title) for title in titles} & {on_site(title) for title in titles}

    def on_github(title: str) -> str:
        return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")

    def on_site(title: str) -> str:
        plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())

    assert [
        f"{path.name}: {target}#{place}"
        for path in PAGES
        for target, place in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text())
        if place not in headings(path.parent / target if target else path)
    ] == []
