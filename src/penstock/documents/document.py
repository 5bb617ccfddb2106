"""Document: a stored text of one model; answers questions behind it without prefilling it again."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias
from weakref import WeakSet

from penstock.core.closing import close_all
from penstock.core.errors import ConfigError, DocumentDamagedError
from penstock.documents.chat_history import CHAT
from penstock.documents.contents import About, needed
from penstock.documents.creating import create_document
from penstock.documents.opened import OpenDocument
from penstock.documents.questions import Params, Question, encode_questions
from penstock.documents.recovery import (
    OnTokens,
    Ranges,
    Recovery,
    mend,
    remake_index,
)
from penstock.documents.settings import (
    STORED,
    DocumentSettings,
    Memory,
    Reader,
    as_loaded,
)
from penstock.documents.stored_states import former_states
from penstock.documents.storing import OnBytes, store_cache
from penstock.engine.stored_past import StoredPast
from penstock.generation.batch_run import OnText
from penstock.generation.engine import LLM
from penstock.generation.output import RequestOutput
from penstock.generation.prompts import Prompt, TokenIds, first_tokens, visuals_in
from penstock.methods import SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_settings import named_policy
from penstock.models.loader import CausalLM, LoadedModel
from penstock.storage.documents import Damage, DocumentWriter

_Caches: TypeAlias = "WeakSet[TieredCache]"
_MOST_RECOVERIES = 3
"""A disk that damages again what was just mended is given up."""


def _unseen(done: int, total: int) -> None:
    pass


class Document:
    """The KV cache of a text on disk, with its retrieval index, for one model.

        with Document.create("recall", text, "contract") as document:
            document.ask("Who signs ?")
        with Document.open("recall", "contract") as document:  # no prefill
            answers = document.ask(["Who signs ?", "When ?"])
            cache = document.cache(new_tokens=64)  # for model.generate

    Every cache is a fork: it reads the stored units where they are, keeps its own new tokens
    beside them, and changes nothing. Whatever is read is checked; damage is prefilled again from
    the stored tokens (`ask` does that by itself), or said.
    """

    def __init__(self, opened: OpenDocument) -> None:
        """Take over an open generation; use `create` or `open`."""
        self._opened = opened
        self._former: list[tuple[OpenDocument, _Caches]] = []
        self._caches: _Caches = WeakSet()
        self.written_bytes = 0
        """Written to the document since it was opened, padding and checksums included."""

    @classmethod
    def create(
        cls, model: str | Path | LoadedModel | CausalLM, text: Prompt, path: str | Path, *,
        policy: str | SelectionPolicy = "kvswap", memory: Memory = "auto", title: str = "",
        name: str | None = None, begins_as: "Document | None" = None,
        settings: DocumentSettings | None = None,
        on_tokens: OnTokens = _unseen, on_bytes: OnBytes = _unseen,
        before_storing: Callable[[], object] = lambda: None,
    ) -> "Document":  # fmt: skip
        """Prefill a text and store it in a folder of its own, all or nothing.

        Args:
            model: as for `LLM`; without a tokenizer, `text` is token ids.
            path: the folder, which is made; the one above it must be there.
            policy: that the prefill runs under and whose index is stored; one that keeps all
                tokens.
            memory: budget of the prefill and, unless they say otherwise, of caches that read it.
            title: what the text is, for people.
            name: that it has in its library, which then finds it under no other.
            begins_as: a stored document of the same model; what both texts have in front is read
                from it, and only the rest is prefilled.
            on_tokens: called with the tokens that are in and all of them.
            on_bytes: called with the bytes stored and all of them.
            before_storing: called when everything is prefilled and nothing is written yet.

        Raises:
            PromptError: the text is empty, or does not fit the model.
            ConfigError: `path` is there already, or the policy forgets tokens.
            BudgetError: the memory is too little; names the smallest that would do.
            UnsupportedModelError: the model cannot work with a tiered cache.
            DocumentMismatchError: `begins_as` is of another model.
            StorageError: the disk is full or failed; nothing is left.
        """
        reader = Reader(as_loaded(model), settings or DocumentSettings())
        base = None if begins_as is None else begins_as._opened
        written = create_document(
            reader, text, Path(path), policy=named_policy(policy), memory=memory, title=title,
            name=name, base=base, on_tokens=on_tokens, on_bytes=on_bytes,
            before_storing=before_storing,
        )  # fmt: skip
        document = cls(OpenDocument.open(reader, Path(path)))
        document.written_bytes = written
        return document

    @classmethod
    def open(
        cls, model: str | Path | LoadedModel | CausalLM, path: str | Path, *,
        settings: DocumentSettings | None = None,
    ) -> "Document":  # fmt: skip
        """Open a stored document; reads its manifest, seals and table of units, nothing else.

        Args:
            model: the one that it was added with.
            path: its folder.

        Raises:
            DocumentMismatchError: another model, tokenizer or adapter; names the fields.
            DocumentError: there is none, it is unfinished, busy, wants a key, or is of a newer
                format.
            DocumentDamagedError: its manifest or seals are damaged.
        """
        reader = Reader(as_loaded(model), settings or DocumentSettings())
        return cls(OpenDocument.open(reader, Path(path)))

    # What it is -------------------------------------------------------------------------------

    @property
    def about(self) -> About:
        """What the document says of itself."""
        return self._opened.about

    @property
    def policy(self) -> SelectionPolicy:
        """That the text was prefilled under, the choices that its index depends on made."""
        return self._opened.policy

    @property
    def tokens(self) -> list[int]:
        """Token ids of the text; read when they are first asked for.

        Raises:
            DocumentDamagedError: they are not what was stored.
        """
        return self._opened.tokens

    @property
    def opened_bytes(self) -> int:
        """Bytes that opening read."""
        return self._opened.opened_bytes

    @property
    def generation(self) -> int:
        """Commits so far."""
        return self._opened.stored.generation

    @property
    def generation_in_use(self) -> OpenDocument:
        """The commit that its caches read."""
        return self._opened

    # Caches -----------------------------------------------------------------------------------

    def cache(
        self, *, new_tokens: int = 1024, batch_size: int = 1, memory: Memory = STORED,
        policy: str | SelectionPolicy | None = None, exact: bool = False,
        past: StoredPast | None = None, **options: Any,
    ) -> TieredCache:  # fmt: skip
        """A cache that holds the text in every row, for `model.generate` and anything else.

        Args:
            new_tokens: room behind the text, for questions and answers.
            memory: its budget; "stored": the settings', or the one that the document was added
                with.
            policy: default: the document's own, which reads units and index in place. Others read
                all of the text once, and make their own index.
            past: the text with more behind it, which takes its room from `new_tokens`.
            options: as for `TieredCache`.

        Raises:
            DocumentDamagedError: what it begins with is not what was stored.
            BudgetError, ConfigError, StorageError: as for `TieredCache`.
        """
        opened = self._opened
        chosen = opened.policy if policy is None else named_policy(policy)
        if chosen.drops:
            raise ConfigError(
                f"{chosen.name} drops tokens by the attention of its own prefill; take another"
            )
        own = chosen == opened.policy and not exact
        cache = TieredCache(
            opened.loaded.model, chosen, opened.budget(memory), opened.settings.store,
            max_tokens=opened.about.tokens + new_tokens, batch_size=batch_size, exact=exact,
            adapter=opened.settings.adapter,
            past=opened.past(with_index=own) if past is None else past,
            sealed=opened.settings.sealed, known=opened.loaded.known, **options,
        )  # fmt: skip
        self._caches.add(cache)
        opened.restore_beside(cache)
        return cache

    # Asking -----------------------------------------------------------------------------------

    def ask(
        self, questions: Prompt | Sequence[Prompt], sampling_params: Params = None, *,
        on_text: OnText | None = None, on_tokens: OnTokens = _unseen,
        on_answer: Callable[[RequestOutput], object] = lambda answer: None, keep: bool = False,
        verify: int | None = None, **options: Any,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer questions, each behind the same text and unaware of the others.

        Damage that is met is prefilled again and stored before the answer is given; the report
        says so (`run.recomputed_tokens`).

        Args:
            questions: as the prompts of `LLM.generate`, read behind the text with nothing between.
            sampling_params: one for all, or one for each; None: as the model's own generation
                config has them.
            on_text: called with the number of the answer and its next piece; without `n`, that is
                the number of the question.
            on_tokens: called with the tokens that are prefilled again.
            on_answer: called with each answer when it is done, and kept if it is to be.
            keep: append question and answer to the document, so that the next question comes
                behind them, in this call too: a chat.
            verify: as for `LLM`.
            options: `memory`, `policy`, `exact` and others of `cache`.

        Raises:
            PromptError: a question is empty, or too long behind this text; before any is answered,
                as far as that can be known then.
            DocumentDamagedError: damage that cannot be mended.
            DocumentBusyError: an answer is to be kept, or damage mended, while another writes
                to the document, or after they did.
            ConfigError, StorageError: as for `cache`.
        """
        if keep and (options.get("policy") is not None or options.get("exact")):
            raise ConfigError("answers are kept under the document's own policy alone")
        if keep and CHAT in self._opened.stored.blob_names:
            raise ConfigError("the document is a chat; go on with it by penstock chat --resume")
        answers, first = [], 0
        for question in self.questions_of(questions, sampling_params, keep=keep):
            attempt = _Attempt(first, on_text)
            first += question.params.num_answers
            llm = LLM(
                self._opened.loaded, verify=verify,
                prefill_chunk_size=self._opened.settings.prefill_chunk_size,
            )  # fmt: skip
            answers.append(self._ask(question, llm, attempt, on_tokens, keep, options))
            on_answer(answers[-1])
        return answers

    def _ask(
        self, question: Question, llm: LLM, attempt: "_Attempt", on_tokens: OnTokens, keep: bool,
        options: dict[str, Any],
    ) -> RequestOutput:  # fmt: skip
        recomputed = 0
        for _ in range(_MOST_RECOVERIES):
            try:
                return self._ask_once(question, llm, attempt, recomputed, keep, options)
            except DocumentDamagedError:
                if attempt.has_text:
                    raise
                recovery = self.recover(on_tokens=on_tokens)
                recomputed += recovery.recomputed_tokens
        return self._ask_once(question, llm, attempt, recomputed, keep, options)

    def _ask_once(
        self, question: Question, llm: LLM, attempt: "_Attempt", recomputed: int, keep: bool,
        options: dict[str, Any],
    ) -> RequestOutput:  # fmt: skip
        opened, params = self._opened, question.params
        ids = [*opened.about.pending, *question.token_ids]  # first what a kept answer left
        at = len(opened.tokens) + len(opened.about.pending)
        new = [each.moved(at) for each in visuals_in(question.token_ids)]
        whole = TokenIds([*opened.tokens, *ids], visuals=[*opened.tokens.visuals, *new])
        batch = llm.batch_of([whole], params)
        batch = replace(batch, texts=[question.text])
        with ExitStack() as stack:
            writer = stack.enter_context(self._extend()) if keep else None  # or refused at once
            room = {"new_tokens": len(ids) + question.max_tokens, "batch_size": params.num_answers}
            cache = self.cache(**{**room, **options})
            with cache:
                [output] = llm.answer(
                    batch, params, cache, on_text=attempt.pass_on,
                    recomputed_tokens=min(recomputed, opened.about.tokens),
                )  # fmt: skip
                if writer is not None:
                    kept = [*batch.token_ids[0], *output.token_ids]
                    self._keep(writer, cache, TokenIds(kept, visuals=whole.visuals))
        if keep:
            self._reopen()
        return output

    def questions_of(
        self, questions: Prompt | Sequence[Prompt], params: Params, *, keep: bool = False
    ) -> list[Question]:
        """Encode questions and check them all, as `ask` does before it answers the first.

        Raises:
            PromptError, ConfigError: as for `ask`.
        """
        held = self.about.tokens + len(self.about.pending)
        return encode_questions(
            self._opened.loaded, questions, params, held_tokens=held, adds_up=keep
        )

    def _extend(self) -> DocumentWriter:
        opened = self._opened
        return DocumentWriter.extend(
            opened.folder, key=opened.settings.key, generation=opened.stored.generation
        )

    def _keep(self, writer: DocumentWriter, cache: TieredCache, tokens: TokenIds) -> None:
        """Append what a cache holds behind the text, all or nothing."""
        opened, length = self._opened, cache.get_seq_length()
        held = opened.groups[: opened.about.tokens // opened.about.group_tokens]
        about = replace(opened.about, tokens=length, pending=tokens[length:])
        store_cache(
            cache, writer, first_tokens(tokens, length), held, identity=opened.identity,
            about=about, progress=_unseen,
            keep_blobs=former_states(opened.stored.blob_names, opened.about.tokens),
        )  # fmt: skip
        self.written_bytes += writer.written_bytes

    def _reopen(self) -> None:
        """Go on with the newest generation; a former one is closed once no cache reads it."""
        opened = self._opened
        self._opened = OpenDocument.open(opened.reader, opened.folder)
        generations = [*self._former, (opened, self._caches)]
        self._former, self._caches = [], WeakSet()
        for former, caches in generations:
            if any(cache._open for cache in caches):
                self._former.append((former, caches))
            else:
                former.stored.close()

    # Damage -----------------------------------------------------------------------------------

    def verify(self, on_bytes: OnBytes = _unseen) -> Damage:
        """Read everything and check it; goes on behind damage.

        Args:
            on_bytes: called with the bytes checked so far and all of them.
        """
        return needed(self._opened.stored.verify(on_bytes), self._opened.groups)

    def recover(
        self, damage: Damage | None = None, *, on_bytes: OnBytes = _unseen,
        on_tokens: OnTokens = _unseen,
    ) -> Recovery:  # fmt: skip
        """Look for damage, prefill what is damaged again from the stored tokens, and store it.

        Args:
            damage: what `verify` has found; None: look first.

        Returns:
            How much was as it was stored, and how much was not.

        Raises:
            DocumentDamagedError: the tokens themselves are damaged; the text must be added anew.
            DocumentBusyError: another process writes to the document, or has since it was opened.
        """
        opened, about = self._opened, self.about
        damage = self.verify(on_bytes) if damage is None else damage
        ranges = Ranges.find(
            damage, opened.groups, group_tokens=about.group_tokens, length=about.tokens,
            has_windows=about.has_windows, states=opened.state_lengths,
        )  # fmt: skip
        lost = {name for name in damage.blobs if name.startswith("index-")}
        if damage or ranges.groups:
            self.written_bytes += mend(opened, damage, ranges, on_tokens, on_bytes)
            self._reopen()
        if lost:
            self.written_bytes += remake_index(self._opened, lost)
            self._reopen()
        return Recovery(
            restored_tokens=about.tokens - ranges.num_tokens,
            recomputed_tokens=ranges.num_tokens, remade_index=bool(lost),
        )  # fmt: skip

    # The end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the files go; caches over them can read no more. A second call does nothing."""
        former = (each.stored.close for each, _ in self._former)
        close_all(*former, self._opened.stored.close)
        self._former.clear()

    def __enter__(self) -> "Document":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Attempt:
    """Passes an answer on, and remembers whether it has begun."""

    def __init__(self, first: int, on_text: OnText | None) -> None:
        self._first, self._on_text = first, on_text
        self.has_text = False

    def pass_on(self, row: int, piece: str) -> None:
        """A piece of the answer is there."""
        if self._on_text is not None:
            self.has_text = True
            self._on_text(self._first + row, piece)
