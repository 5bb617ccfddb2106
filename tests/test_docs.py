"""README.md says what is there: its commands parse, its code runs, its tree is the real one.

Run as a script, this file writes the tree into README.md.
"""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parents[1]
ROOT = TOP / "src" / "penstock"
README = TOP / "README.md"
DATA_FOLDERS = {"models/recall": "The bundled model and its tokenizer (see its README.md)."}
CLAUSE_COLUMN = 34
TREE = re.compile(r"(?<=<!-- tree -->\n```\n).*?(?=```\n)", re.DOTALL)


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) if path.is_file() else ""
    return (docstring or "").splitlines()[0] if docstring else ""


def tree(folder: Path = ROOT, depth: int = 0) -> list[str]:
    """The package as lines of "name   first line of the docstring", folders behind files."""

    def line(name: str, clause: str, depth: int) -> str:
        return f"{'    ' * depth + name:<{CLAUSE_COLUMN}}{clause}".rstrip()

    name = folder.relative_to(ROOT).as_posix()
    clause = DATA_FOLDERS.get(name) or first_line(folder / "__init__.py")
    lines = [line(f"{folder.name}/", clause, depth)]
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    lines += [line(path.name, first_line(path), depth + 1) for path in files]
    for path in sorted(folder.iterdir()):
        below = path.relative_to(ROOT).as_posix()
        if path.is_dir() and (below in DATA_FOLDERS or (path / "__init__.py").is_file()):
            lines += tree(path, depth + 1)
    return lines


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[str]:
    """Every line of the README's console blocks that calls `program`, continued lines joined."""
    text = "\n".join(code_blocks("sh")).replace("\\\n", " ")
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line.split(" ")[0] == program]


def test_the_first_commands_are_demo_and_test() -> None:
    assert commands("make")[:2] == ["make demo", "make test"]
    assert README.read_text().index("make test") < 800


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (TOP / "Makefile").read_text(), re.MULTILINE)
    named = {target for command in commands("make") for target in command.split()[1:]}
    assert named - set(targets) == set()


@pytest.mark.parametrize("command", commands("penstock"))
def test_penstock_commands_parse(command: str) -> None:
    import typer.main

    from penstock.bench import accuracy, needles, throughput
    from penstock.bench.documents import program as documents
    from penstock.bench.figures import report
    from penstock.bench.search import speed
    from penstock.bench.settings import program as settings
    from penstock.bench.tuning import program as tuning
    from penstock.cli.main import app

    group: Any = typer.main.get_command(app)
    name, *arguments = shlex.split(command)[1:]
    if name == "bench":
        programs = {
            "documents": documents, "tune": tuning,
            "accuracy": accuracy, "needles": needles, "report": report, "search": speed,
            "settings": settings,
            "throughput": throughput,
        }  # fmt: skip
        programs[arguments[0]].parse_arguments(arguments[1:])
        return
    subcommand = group.commands[name]
    subcommand.make_context(name, arguments)


def test_readme_names_every_subcommand() -> None:
    from penstock.cli.main import app

    named = {command.split()[1] for command in commands("penstock")}
    groups = {
        group.typer_instance.info.name
        for group in app.registered_groups
        if group.typer_instance is not None
    }
    assert named == groups | {command.name for command in app.registered_commands}


@pytest.mark.parametrize("code", code_blocks("python"))
def test_python_blocks_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.models.cache_argument import OUTPUT_NAME

    code = code.replace("cache=cache", f"{OUTPUT_NAME}=cache")  # as it says of older releases
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out


def test_the_tree_is_the_real_one() -> None:
    [shown] = TREE.findall(README.read_text())
    assert shown.splitlines() == tree(), "`make tree` writes it anew"


def test_links_lead_somewhere() -> None:
    texts = sorted([*TOP.glob("*.md"), *TOP.glob("docs/*.md")])
    assert README in texts
    assert [
        f"{path.name}: {target}"
        for path in texts
        for target in re.findall(r"\]\(([^)#]+)", path.read_text())
        if not target.startswith("http") and not (path.parent / target).exists()
    ] == []


if __name__ == "__main__":
    README.write_text(TREE.sub(lambda _: "\n".join(tree()) + "\n", README.read_text()))
