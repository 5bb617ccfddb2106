"""Draw the ladder of packages, as tests/test_layers.py has it: docs/images/ladder.svg."""

import runpy
from pathlib import Path

TOP = Path(__file__).parents[2]
PICTURE = TOP / "docs" / "images" / "ladder.svg"
ABOUT = {
    "core": "data, errors, memory ledger, traces",
    "devices": "what the hardware can do",
    "kernels": "functions over tensors, plain twins",
    "storage": "bytes in, bytes out",
    "engine": "layers, tiers, fetch plans; bases of policies and indexes",
    "methods": "one folder a method; folders are strangers",
    "models": "the only package that knows Hugging Face",
    "generation": "LLM and sampling over transformers' generate",
    "documents": "KV that is kept",
    "search": "step-wise search",
    "workloads": "what a cache is given to work on",
    "tuner": "settings from measurements and models of cost",
    "evaluate": "a user's bench: tasks, accuracy, audit, throughput",
    "bench": "evaluate, as of old",
    "server": "HTTP over the engine, and a page",
    "cluster": "replicas and devices on several hosts",
    "cli": "entry points",
    "testing": "contracts and doubles",
    "research": "not in the wheel",
}
COLOURS = (("#c9ecd0", "#2f855a"), ("#b9dcff", "#2b6cb0"), ("#ffd79a", "#b9770e"))
WIDTH, HEIGHT, GAP, SIDE = 900, 44, 12, 40
STYLE = (
    ".n{font-weight:700;fill:#10151f}.a{fill:#10151f}"
    ".g{fill:#848b99;font-weight:600}.w{stroke:#848b99;stroke-width:2;marker-end:url(#u)}"
)


def rungs() -> list[list[str]]:
    """The packages of each rung, the lowest first."""
    ladder = runpy.run_path(str(TOP / "tests" / "test_layers.py"))["LADDER"]
    return [sorted(packages) for packages in ladder]


def drawing(ladder: list[list[str]]) -> str:
    """The picture's SVG."""
    parts = []
    for number, packages in enumerate(ladder):
        y = 12 + number * (HEIGHT + GAP)
        fill, edge = COLOURS[min(2, 3 * number // len(ladder))]
        width = (WIDTH - SIDE - 12 - GAP * (len(packages) - 1)) / len(packages)
        for place, name in enumerate(packages):
            x = SIDE + place * (width + GAP)
            about = f'<tspan class="a" dx="12">{ABOUT.get(name, "")}</tspan>'
            down = 28
            if len(packages) > 2:  # too narrow for one line
                about, down = about.replace('dx="12"', f'x="{x + 14:g}" dy="17"'), 19
            parts.append(
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{HEIGHT}" rx="7" '
                f'fill="{fill}" stroke="{edge}"/><text x="{x + 14:g}" y="{y + down}">'
                f'<tspan class="n">{name}</tspan>{about}</text>'
            )
    end = 12 + len(ladder) * (HEIGHT + GAP)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end + 26}" role="img" '
        'aria-label="The ladder of packages" font-family="system-ui, sans-serif" font-size="15">'
        '<defs><marker id="u" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 10 5 0 10z" fill="#848b99"/></marker>'
        f"<style>{STYLE}</style></defs>"
    )
    arrow = f'<path class="w" d="M20 {end - GAP}V14"/>'
    rule = f'<text class="g" x="{SIDE}" y="{end + 14}">a package imports only from above</text>'
    return "\n".join([head, arrow, *parts, rule, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(drawing(rungs()), encoding="utf-8")
