"""A chat that goes on where it was, whatever became of its process.

Every run is one turn. Its KV cache is appended to a document on the disk in one commit: the next
run knows all turns before it and prefills none of them. Run it twice, and the second run answers
from what the first one was told.

    python chat_that_survives.py
    python chat_that_survives.py
    python chat_that_survives.py --model ./my-model --memory 256MiB --chat supper "What to cook?"
"""

import argparse
from pathlib import Path

from penstock import Document, SamplingParams

OPENING = 60 * "The grass is green . The sky is blue . The sun is yellow . Here we go . "
ASK = "Question : What is the secret word for {0} ? Answer : The secret word for {0} is"
TURNS = (
    "The secret word for quiet door is quick potato . "
    "The secret word for broad tower is sharp wheel . " + ASK.format("quiet door"),
    ASK.format("broad tower"),  # asked in another process than the one that was told
)


def main() -> None:
    """Take one turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("turn", nargs="?", help="what you say; default: the next of two turns")
    parser.add_argument("--model", default="recall", help="the bundled model, or a model's folder")
    parser.add_argument("--memory", default="2MiB", help="for the chat's cache, however long it is")
    parser.add_argument("--opening", default=OPENING, help="what stands before the first turn")
    parser.add_argument("--chat", type=Path, default=Path("chat"), help="the document's folder")
    arguments = parser.parse_args()

    model, chat = arguments.model, arguments.chat
    if not chat.exists():
        Document.create(model, arguments.opening, chat, memory=arguments.memory).close()
    params = SamplingParams(temperature=0, max_tokens=64, stop=(" .", "\n"))
    with Document.open(model, chat) as document:
        held = document.about.tokens
        turn = arguments.turn or TURNS[min(document.generation, len(TURNS)) - 1]
        print(f"The chat holds {held:,} tokens.\n> {turn}")
        [answer] = document.ask(f" {turn}", params, memory=arguments.memory, keep=True)
        print(answer.text.strip())
        share = answer.memory.peak_bytes / answer.memory.full_cache_bytes
        print(
            f"Prefilled {answer.prompt_tokens - held} tokens, with {share:.0%} of the KV cache in "
            f"memory. The chat holds {document.about.tokens:,}."
        )


if __name__ == "__main__":
    main()
