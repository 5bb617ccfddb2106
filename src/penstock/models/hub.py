"""HubModel: a model by its name on the Hugging Face hub: from the local cache, or fetched.

Downloading, resuming, tokens and environment variables (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_TOKEN) are huggingface_hub's. Here is which files are taken, in which order, and their check.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import tqdm, validate_repo_id  # type: ignore[attr-defined]

from penstock.core.errors import ModelLoadError, StorageError
from penstock.models.fetch import OnBytes
from penstock.models.load_errors import said_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt",
)  # fmt: skip
_SMALL = (
    *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "merges.txt", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "generation_config.json", INDEX,
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_PIECE = 1 << 20
_UNCHECKED = ".penstock-unchecked-"
"""Begins the name of a file that lies in a model's cache folder until all of it was checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubModel:
    """A name on the hub, and how the hub is asked for it."""

    name: str
    revision: str | None = None
    """A branch, a tag or a commit; None: "main"."""
    token: str | bool | None = None
    offline: bool = False
    own_code: bool = False
    """Whether the model's Python files are taken too."""

    @property
    def is_possible(self) -> bool:
        """Whether a model can be called that at all."""
        try:
            validate_repo_id(self.name)
        except HFValidationError:
            return False
        return True

    @property
    def is_offline(self) -> bool:
        """Whether the hub may not be asked."""
        return self.offline or constants.HF_HUB_OFFLINE

    def cached_folder(self) -> Path | None:
        """The model's folder in the local cache, whole or not; None: nothing of it is there."""
        found = try_to_load_from_cache(self.name, CONFIG, revision=self.revision)
        return Path(found).parent if isinstance(found, str) else None

    def missing_part(self, folder: Path) -> str | None:
        """What a cached folder lacks to be loaded; None: nothing."""
        if _marker(folder.parents[1], folder.name).exists():
            return "the check of its files"
        if not any((folder / file).is_file() for file in TOKENIZERS):
            return "its tokenizer"
        if (folder / WEIGHTS).is_file():
            return None
        if not (folder / INDEX).is_file():
            return WEIGHTS
        return next((name for name in _shards(folder) if not (folder / name).is_file()), None)

    def fetch(self, check: Callable[[Path], None], on_bytes: OnBytes) -> Path:
        """Bring the model's files into the local cache, and check every one that is new.

        Args:
            check: called with the folder as soon as config.json is there, before any weights are
                fetched; what it raises ends the fetch.
            on_bytes: called with the progress.

        Returns:
            The model's folder.

        Raises:
            ModelLoadError: there is no such model, it may not be read, its weights are pickles, the
                hub cannot be reached, or a file is not what the hub says.
            StorageError: the cache cannot be written.
        """
        with self._said():
            api = HfApi(endpoint=constants.ENDPOINT, token=self.token)
            info = api.model_info(
                self.name, revision=self.revision, files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )  # fmt: skip
            files = {each.rfilename: each for each in info.siblings or ()}
            self._require_weights(files)
            fetch = _Fetch(self, str(info.sha), files, on_bytes)
            folder = fetch.folder
            fetch.bring([CONFIG, *(_matching(files, ("*.py",)) if self.own_code else ())])
            check(folder)
            fetch.bring(_matching(files, _SMALL))
            fetch.bring([WEIGHTS] if WEIGHTS in files else _shards(folder))
            # The cache learns which commit the revision is when all of it is there, not before.
            self._download(CONFIG, self.revision, _bar_for(lambda done: None))
            fetch.end()
        return folder

    def _require_weights(self, files: dict[str, RepoSibling]) -> None:
        if CONFIG not in files:
            instead = "it holds no model that transformers knows"
            if "adapter_config.json" in files:
                instead = (
                    "it is a PEFT adapter: load its base model, put the adapter on it with peft, "
                    "and give the model object"
                )
            elif gguf := next(iter(_matching(files, ("*.gguf",))), None):
                instead = (
                    "it holds GGUF files: fetch one and give its path (hf download "
                    f"{self.name} {gguf})"
                )
            raise ModelLoadError(f"{self.name} has no {CONFIG} on the hub; {instead}")
        if WEIGHTS in files or INDEX in files:
            return
        pickle = next(iter(_matching(files, _PICKLES)), None)
        if pickle is not None:
            raise ModelLoadError(
                f"{self.name} has its weights only as pickles ({pickle}), which can run code when "
                "they are read; take a model, or a --revision of it, with safetensors"
            )
        raise ModelLoadError(f"{self.name} has no {WEIGHTS} on the hub")

    def _download(self, file: str, revision: str | None, bar: Any) -> str:
        return hf_hub_download(
            self.name, file, revision=revision, token=self.token, endpoint=constants.ENDPOINT,
            tqdm_class=bar,
        )  # fmt: skip

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Turn what huggingface_hub raises into one line with what to do."""
        name, hub = self.name, constants.ENDPOINT
        try:
            yield
        except (ModelLoadError, StorageError):
            raise
        except GatedRepoError as error:
            raise ModelLoadError(
                f"{name} is gated: accept its conditions at {hub}/{name}, then log in with: hf "
                "auth login (or set HF_TOKEN)"
            ) from error
        except RepositoryNotFoundError as error:
            raise ModelLoadError(
                f"there is no model folder {name}, and no model of that name at {hub}; if it is "
                "private, log in with: hf auth login (or set HF_TOKEN)"
            ) from error
        except RevisionNotFoundError as error:
            raise ModelLoadError(f"{name} has no revision {self.revision!r} at {hub}") from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            advice = "the token may not read it" if status in (401, 403) else "try again later"
            raise ModelLoadError(f"{hub} answers {status} for {name}; {advice}") from error
        except LocalEntryNotFoundError as error:
            raise self._unreachable(error.__cause__ or error) from error
        except OfflineModeIsEnabled as error:
            raise self._unreachable(error) from error
        except OSError as error:
            if error.errno is None:  # a file of another size than the hub said
                raise ModelLoadError(f"{name}: {said_of(error)} run it again to go on") from error
            what = f"cannot write {error.filename or constants.HF_HUB_CACHE}: {error.strerror}"
            raise StorageError(f"{name}: {what}") from error
        except Exception as error:
            if not type(error).__module__.startswith(("httpx", "httpcore")):
                raise
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> ModelLoadError:
        said = error if isinstance(error, Exception) else Exception(str(error))
        return ModelLoadError(
            f"there is no model folder {self.name}, the local Hugging Face cache does not hold it "
            f"whole, and {constants.ENDPOINT} cannot be reached ({said_of(said)}); with a network, "
            f"run: {self.fetch_command}"
        )

    @property
    def fetch_command(self) -> str:
        """The command that brings the model into the local cache."""
        chosen = "" if self.revision is None else f" --revision {self.revision}"
        return f"penstock fetch {self.name}{chosen}"


class _Fetch:
    """One fetch of one commit: files are downloaded one after the other, and checked."""

    def __init__(
        self, model: HubModel, commit: str, files: dict[str, RepoSibling], on_bytes: OnBytes
    ) -> None:
        repository = Path(constants.HF_HUB_CACHE) / repo_folder_name(
            repo_id=model.name, repo_type="model"
        )
        self.folder = repository / "snapshots" / commit
        self._model, self._commit, self._files, self._on_bytes = model, commit, files, on_bytes
        self._marker = _marker(repository, commit)
        self._all = self._marker.exists()
        """Whether files that are there already are checked too: a former fetch did not end."""
        repository.mkdir(parents=True, exist_ok=True)
        self._marker.touch()

    def bring(self, names: Iterable[str]) -> None:
        """Download what is missing of these files; check what is new."""
        names = [name for name in names if name in self._files]
        there = {name for name in names if (self.folder / name).is_file()}
        sizes = {name: self._files[name].size or 0 for name in names if name not in there}
        done, total = 0, sum(sizes.values())
        for name in names:
            if name not in there:
                start = done

                def report(bytes: int, start: int = start) -> None:
                    now = min(start + bytes, total)
                    self._on_bytes(f"fetching {self._model.name}", now, total)

                self._model._download(name, self._commit, _bar_for(report))
                done += sizes[name]
            if name not in there or self._all:
                self._check(name)

    def end(self) -> None:
        """Every file was checked."""
        self._marker.unlink(missing_ok=True)

    def _check(self, name: str) -> None:
        """Refuse a file that is not what the hub says, and remove it.

        A large file's SHA-256 is known, and of others the SHA-1 under which git keeps them.
        """
        path, said = self.folder / name, self._files[name]
        size = path.stat().st_size
        if said.lfs is not None:
            digest, wanted, kind = hashlib.sha256(), said.lfs.sha256, "SHA-256"
        elif said.blob_id is not None:
            digest, wanted, kind = hashlib.sha1(usedforsecurity=False), said.blob_id, "SHA-1 in git"
            digest.update(b"blob %d\0" % size)
        else:
            return
        done = 0
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                done += len(piece)
                self._on_bytes(f"checking {name}", done, size)
        if digest.hexdigest() == wanted:
            return
        blob = path.resolve()
        path.unlink()
        if blob != path:
            blob.unlink(missing_ok=True)
        raise ModelLoadError(
            f"{self._model.name}: {name} is damaged: its {kind} is {digest.hexdigest()}, not "
            f"{wanted}; it was removed, fetch it again: {self._model.fetch_command}"
        )


def _bar_for(report: Callable[[int], None]) -> Any:
    """A progress bar that draws nothing, and reports how many bytes of one file are there.

    A file may have two bars, of what came over the network and of what was put together of it.
    """
    counts: dict[int, int] = {}

    parent: Any = tqdm

    class Bar(parent):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            counts[id(self)] = int(options.get("initial") or 0)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            counts[id(self)] += int(n or 0)
            report(max(counts.values()))

    return Bar


def _marker(repository: Path, commit: str) -> Path:
    return repository / f"{_UNCHECKED}{commit}"


def _matching(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if any(fnmatchcase(name, each) for each in patterns))


def _shards(folder: Path) -> list[str]:
    """The files that the weights of a folder are in, as its index says."""
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return sorted({os.path.basename(str(name)) for name in content["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{folder}: {INDEX} cannot be read: {said_of(error)}") from error
