"""The pages say what is there: the README is short, targets and commands exist, links lead on.

What the pages' examples do is in `test_examples.py`, and their figures are in `test_figures.py`.
"""

import re
from pathlib import Path

TOP = Path(__file__).parents[1]
README = TOP / "README.md"
README_BYTES_MAX = 8192
PAGES = [
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/**/*.md", "training/*.md")
    for path in sorted(TOP.glob(pattern))
]
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


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (TOP / "Makefile").read_text(), re.MULTILINE)
    named = {word for page in PAGES for words in commands(page, "make") for word in words[1:]}
    assert {word for word in named if "=" not in word} - set(targets) == set()


def test_the_page_of_commands_names_every_one() -> None:
    from penstock.cli.main import app

    named = {words[1] for words in commands(TOP / "docs" / "commands.md", "penstock")}
    groups = {
        group.typer_instance.info.name
        for group in app.registered_groups
        if group.typer_instance is not None
    }
    assert named == groups | {command.name for command in app.registered_commands}


def test_links_lead_somewhere() -> None:
    assert README in PAGES
    assert [
        f"{path.name}: {target}"
        for path in PAGES
        for target in re.findall(r"\]\(([^)#]+)", path.read_text())
        if not target.startswith("http") and not (path.parent / target).exists()
    ] == []


def test_places_in_pages_exist() -> None:
    """A link to a heading names one that is there, as GitHub spells it."""

    def headings(path: Path) -> set[str]:
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    assert [
        f"{path.name}: {target}#{place}"
        for path in PAGES
        for target, place in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text())
        if place not in headings(path.parent / target if target else path)
    ] == []
