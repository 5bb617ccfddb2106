"""A Hugging Face hub in this process: models with revisions, large files, tokens, and mishaps."""

import hashlib
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"


@dataclass
class Repository:
    """A model's files, by commit."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit, and move a branch to it."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


class Hub(ThreadingHTTPServer):
    """The server; tests change what it does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        """Method, path and range of every request."""
        self.cut: dict[str, int] = {}
        """By file: after how many bytes its next answer ends, once."""
        self.damaged: set[str] = set()
        """Files of which one byte is another than the hub says, once."""
        self.status = 200

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, folder: Path, **more: bytes) -> Repository:
        """Offer a model folder, with more files."""
        files = {path.name: path.read_bytes() for path in folder.iterdir()} | more
        repository = self.repositories[name] = Repository()
        repository.commit(files)
        return repository

    def fetched(self, file: str) -> list[str]:
        """The requests for a file's content."""
        return [each for each in self.asked if each.startswith("GET") and f"/{file} " in each]


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: Any = self.server
        path = unquote(urlsplit(self.path).path)
        wanted = self.headers.get("Range", "")
        hub.asked.append(f"{self.command} {path} {wanted}")
        parts = path.strip("/").split("/")
        about = parts[:2] == ["api", "models"]
        parts = parts[2:] if about else parts
        repository = hub.repositories.get("/".join(parts[:2]))
        if hub.status != 200:
            self._say(hub.status)
        elif repository is None:
            self._say(404 if self._knows_us() else 401, "RepoNotFound")
        elif repository.private and not self._knows_us():
            self._say(401, "RepoNotFound")
        else:
            revision = parts[3] if len(parts) > 3 else "main"
            commit = repository.branches.get(revision, revision)
            if commit not in repository.commits:
                self._say(404, "RevisionNotFound")
            elif about:
                self._say(200, body=json.dumps(_about(repository, commit)).encode())
            elif repository.gated and not self._knows_us():
                self._say(403, "GatedRepo")
            elif (file := "/".join(parts[4:])) not in repository.commits[commit]:
                self._say(404, "EntryNotFound", {"X-Repo-Commit": commit})
            else:
                self._send(hub, commit, file, repository.commits[commit][file], wanted)

    def _knows_us(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _send(self, hub: Hub, commit: str, file: str, content: bytes, wanted: str) -> None:
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(file, content)}"'}
        headers["X-Linked-Size"] = str(len(content))
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        body = content[first:]
        if self.command == "GET" and file in hub.damaged:
            hub.damaged.remove(file)
            body = body[:-1] + bytes([body[-1] ^ 1])
        cut = hub.cut.pop(file, None) if self.command == "GET" else None
        self._say(206 if first else 200, None, headers, body, cut)

    def _say(
        self, status: int, code: str | None = None, headers: dict[str, str] | None = None,
        body: bytes = b"", cut: int | None = None,
    ) -> None:  # fmt: skip
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Silent."""


def _is_large(file: str) -> bool:
    return file.endswith((".safetensors", ".bin"))


def _etag(file: str, content: bytes) -> str:
    if _is_large(file):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _about(repository: Repository, commit: str) -> dict[str, Any]:
    siblings = []
    for name, content in repository.commits[commit].items():
        said: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
        if _is_large(name):
            sha256 = _etag(name, content)
            said["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 134}
        else:
            said["blobId"] = _etag(name, content)
        siblings.append(said)
    return {
        "id": "it", "modelId": "it", "sha": commit, "private": repository.private, "tags": [],
        "siblings": siblings, "downloads": 0, "likes": 0,
    }  # fmt: skip
