"""A hook of mkdocs: what the pages link outside of docs/ comes into the site, under repository/.

Pages are written for a checkout, where ../benchmarks/results/x.json is a file beside docs/. Linked
files are copied as they are; linked Markdown becomes a page, whose own links are followed too.
"""

import os
import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

INTO = "repository"
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def _is_local(target: str) -> bool:
    return re.match(r"[a-z]+:|/", target) is None


def _in_site(place: str) -> str:
    """Where a file of the repository is in the site."""
    return place.removeprefix("docs/") if place.startswith("docs/") else f"{INTO}/{place}"


def _in_repository(src: str) -> str:
    """Where a file of the site is in the repository."""
    return src.removeprefix(f"{INTO}/") if src.startswith(f"{INTO}/") else f"docs/{src}"


def _links(text: str) -> list[str]:
    prose = CODE.sub("", text)
    return [match[1] for match in LINK.findall(prose) if _is_local(match[1])]


def on_files(files: Files, config: Any) -> Files:
    """Add every file that a page links, and those that the added pages link."""
    top = Path(config.docs_dir).parent
    known = {_in_repository(file.src_uri) for file in files}
    unread = [_in_repository(file.src_uri) for file in files.documentation_pages()]
    while unread:
        page = unread.pop()
        for target in _links((top / page).read_text(encoding="utf-8")):
            place = normpath(os.path.join(os.path.dirname(page), target))
            if place in known or not (top / place).is_file():
                continue
            known.add(place)
            files.append(
                File.generated(
                    config,
                    _in_site(place),
                    abs_src_path=str(top / place),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
            if place.endswith(".md"):
                unread.append(place)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to where the site has their files."""
    here = page.file.src_uri
    folder = os.path.dirname(_in_repository(here))

    def moved(match: re.Match[str]) -> str:
        if not _is_local(match[2]):
            return match[0]
        place = normpath(os.path.join(folder, match[2]))
        return f"{match[1]}{relpath(_in_site(place), os.path.dirname(here) or '.')}{match[3]}"

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts)
