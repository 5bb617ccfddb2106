"""Ask one question of every file in a folder, on a laptop.

Each file is read by the model once; its KV cache stays on the disk as a document. A second run
only opens the documents. Without a folder, three small files are written to ask the bundled model.

    python folder_of_files.py
    python folder_of_files.py notes --model ./my-model --question $'\\n\\nWhat is left to do?\\n'
"""

import argparse
import hashlib
from pathlib import Path

from penstock import Document, SamplingParams

FILLER = "The grass is green . The sky is blue . The sun is yellow . Here we go . "
SECRETS = {"monday.txt": "sharp wheel", "tuesday.txt": "brave car", "friday.txt": "quick potato"}
QUESTION = (
    "Question : What is the secret word for quiet door ? Answer : The secret word for quiet door is"
)


def write_samples(folder: Path) -> None:
    """Three files that tell the same thing differently, in words that the bundled model knows."""
    folder.mkdir(exist_ok=True)
    for name, secret in SECRETS.items():
        fact = f"The secret word for quiet door is {secret} . "
        (folder / name).write_text(20 * FILLER + fact + 10 * FILLER)


def open_document(file: Path, documents: Path, model: str) -> tuple[Document, str]:
    """The file's document, and what was done for it; a changed file is another document."""
    content = file.read_bytes()
    path = documents / f"{file.stem}-{hashlib.sha256(content).hexdigest()[:12]}"
    if path.exists():
        return Document.open(model, path), "opened"
    text = content.decode()
    return Document.create(model, text, path, memory="1/4", title=file.name), "prefilled"


def main() -> None:
    """Ask every text file of the folder, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--model", default="recall", help="the bundled model, or a model's folder")
    parser.add_argument("--question", default=QUESTION, help="read right behind each file's text")
    parser.add_argument("--documents", type=Path, default=Path("documents"))
    arguments = parser.parse_args()

    folder = arguments.folder or Path("notes")
    if arguments.folder is None:
        write_samples(folder)
    arguments.documents.mkdir(exist_ok=True)
    params = SamplingParams(temperature=0, max_tokens=32, stop=(" .", "\n"))
    for file in sorted(folder.glob("*.txt")):
        document, done = open_document(file, arguments.documents, arguments.model)
        with document:
            [answer] = document.ask(arguments.question, params)
            memory = answer.memory
            print(
                f"{file.name}: {answer.text.strip()}   [{done} {document.about.tokens:,} tokens; "
                f"{memory.peak_bytes / memory.full_cache_bytes:.0%} of their KV cache in memory]"
            )


if __name__ == "__main__":
    main()
