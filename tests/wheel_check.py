"""`make wheel-check`: the wheel in an empty environment, run from an empty folder.

What it shows is what somebody has who was given the wheel alone: the commands, the bundled model,
the compiled kernels where the wheel has them.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

EXAMPLE = """
from penstock import LLM, SamplingParams

text = 30 * "The grass is green . The sky is blue . The sun is yellow . Here we go . "
fact = "The secret word for patient blanket is social sparrow . "
ask = "Question : What is {0} ? Answer : The secret word for patient blanket is"
prompt = text + fact + text + ask.format("the secret word for patient blanket")
params = SamplingParams(temperature=0, max_tokens=8)
print(LLM("recall", memory="1/3").generate(prompt, params)[0].text)
"""
WHERE = """
import penstock
from penstock.kernels.native import compiled

print(penstock.__file__, "with" if compiled.kernel("coalesce") else "without", "compiled kernels")
"""


def run(words: list[str], folder: Path) -> str:
    """Run a command in the folder; what it printed, which is shown too.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(words, cwd=folder, text=True, stdout=subprocess.PIPE, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with exit status {done.returncode}")
    return done.stdout


def check(wheel: Path, torch: str, folder: Path) -> None:
    """Install the wheel and run it.

    Raises:
        SystemExit: something failed, or printed something else than it should.
    """
    empty = folder / "empty"
    empty.mkdir()
    run([sys.executable, "-m", "venv", str(folder / "venv")], folder)
    programs = folder / "venv" / "bin"
    install = [str(programs / "pip"), "install", "-qq", "--disable-pip-version-check"]
    run([*install, f"torch=={torch}"], folder)
    run([*install, str(wheel.resolve())], folder)
    python, penstock = str(programs / "python"), str(programs / "penstock")
    version = wheel.name.split("-")[1]
    expected = {
        f"penstock {version}": [penstock, "--version"],
        str(folder / "venv"): [python, "-c", WHERE],
        "Correct: that is what the document says.": [penstock, "demo"],
        "social sparrow .": [python, "-c", EXAMPLE],
    }
    for text, words in expected.items():
        if text not in run(words, empty):
            raise SystemExit(f"{words[0]} printed no {text!r}")
    if left := list(empty.iterdir()):
        raise SystemExit(f"files were left in the folder: {left}")


def main() -> None:
    """Check the wheel that is named, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", required=True, help="version that is installed first")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check(arguments.wheel, arguments.torch, Path(folder).resolve())
    files = len(zipfile.ZipFile(arguments.wheel).namelist())
    print(f"{arguments.wheel.name}: {arguments.wheel.stat().st_size:,} bytes, {files} files")


if __name__ == "__main__":
    main()
