"""Conversation: a chat on one KV cache that grows from turn to turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from penstock.core.closing import DeferredInterrupts, close_all
from penstock.core.errors import (
    ConfigError,
    DocumentDamagedError,
    PenstockError,
    PromptError,
)
from penstock.core.ledger import MemoryReport
from penstock.documents.chat_history import ChatHistory, shared_beginning
from penstock.documents.chat_storing import open_chat, save_chat
from penstock.documents.creating import prefill
from penstock.documents.opened import OpenDocument
from penstock.documents.recovery import OnTokens
from penstock.documents.settings import STORED, DocumentSettings, Memory, Reader, as_loaded
from penstock.documents.storing import OnBytes
from penstock.engine.policy import SelectionPolicy
from penstock.engine.stored_past import SECTOR_BYTES
from penstock.generation.cache_choices import CacheChoices
from penstock.generation.chat_template import ChatTemplate
from penstock.generation.engine import LLM
from penstock.generation.output import RequestOutput
from penstock.generation.prompts import TokenIds, first_tokens
from penstock.generation.sampling import SamplingParams
from penstock.methods.tuned_config import TunedConfig
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_settings import named_policy
from penstock.models.loader import CausalLM, LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.processing import Media, draw
from penstock.storage.store import Sealing

T = TypeVar("T")


def _unseen(done: int, total: int) -> None:
    pass


def _unheard(share: float) -> None:
    pass


@dataclass(kw_only=True)
class ChatCounts:
    """Tokens of a chat. What is held now was restored, prefilled or decoded, less what went."""

    turns: int = 0
    restored_tokens: int = 0
    """Came with a saved chat."""
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    """Of answers, held since they were chosen; an answer's last token is prefilled with what is
    behind it."""
    dropped_tokens: int = 0
    """Taken away again: the template has rewritten them, or a turn was given up."""

    @property
    def held_tokens(self) -> int:
        """Tokens in the cache."""
        computed = self.restored_tokens + self.prefilled_tokens + self.decoded_tokens
        return computed - self.dropped_tokens


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """One answer, and what it took."""

    output: RequestOutput
    prefilled_tokens: int
    dropped_tokens: int
    """That the cache held before, and the template has rewritten."""
    read_bytes: int
    memory: MemoryReport
    is_full: bool
    """Whether the answer ended because no more tokens fit the chat."""

    @property
    def text(self) -> str:
        """The answer."""
        return self.output.text


class Conversation:
    """A chat on one KV cache: each turn prefills what is new in it, and nothing else.

        with Conversation("Qwen/Qwen3-0.6B", memory="256MiB") as chat:
            print(chat.ask("What is the capital of France?").text)
            chat.save("trip")
        with Conversation.resume("Qwen/Qwen3-0.6B", "trip") as chat:  # no prefill
            print(chat.ask("And of Italy?").text)

    The model's chat template renders the whole history at each turn. Where it rewrites what is held
    (it strips thoughts from answers, or says another date), the cache goes back to what both have
    in front; with recurrent layers to the last turn's end before that, and the rest is prefilled
    again. The memory budget is that of `max_tokens`, fixed for the chat's life.

    Args:
        model: as for `LLM`, with a tokenizer.
        system: the system prompt; None: the template's own, if it has one.
        template: in place of the tokenizer's own, or with variables.
        policy, memory, exact, verify, config, seal: as for `LLM`.
        max_tokens: most tokens of the whole chat; None: the model's positions, or the longest
            context of the config.
        settings: where caches lie, an adapter, the key of saved chats.

    Raises:
        ConfigError: the model has no chat template, or a setting makes no sense.
        BudgetError: the memory is too little; names the smallest that would do.
        UnsupportedModelError: the model cannot work with a tiered cache.
    """

    def __init__(
        self, model: str | Path | LoadedModel | CausalLM, *, system: str | None = None,
        template: ChatTemplate | None = None, policy: str | SelectionPolicy | None = None,
        memory: Memory = "auto", max_tokens: int | None = None, exact: bool = False,
        verify: int | None = None, config: TunedConfig | str | Path | None = None,
        seal: Sealing = "auto", settings: DocumentSettings | None = None,
    ) -> None:  # fmt: skip
        settings = settings or DocumentSettings()
        choices = CacheChoices.of(
            policy=policy, memory=memory, store=settings.store, adapter=settings.adapter,
            config=config,
        )  # fmt: skip
        if max_tokens is None and choices.config is not None:
            max_tokens = choices.config.max_context
        self._begin(model, template, max_tokens, settings, verify)
        self._history.set_system(system)
        chosen = choices.for_batch(1, self.max_tokens)
        self._policy, self._memory = named_policy(chosen.policy), chosen.memory
        settings = replace(settings, store=chosen.store, adapter=chosen.adapter)
        self._reader = Reader(self._loaded, settings)
        self.notices = list(chosen.notices)
        self._cache = TieredCache(
            self._loaded.model, self._policy, self._memory, settings.store,
            max_tokens=self.max_tokens, exact=exact, adapter=settings.adapter,
            sector_bytes=SECTOR_BYTES, checkpoints=1,
            sealed=True if settings.key is not None else seal, progress=self._report_tokens,
            index_progress=self._report_index, known=self._loaded.known,
        )  # fmt: skip
        self.notices += self._cache.notices

    @classmethod
    def resume(
        cls, model: str | Path | LoadedModel | CausalLM, path: str | Path, *,
        template: ChatTemplate | None = None, memory: Memory = STORED,
        max_tokens: int | None = None, exact: bool = False, verify: int | None = None,
        seal: Sealing = "auto", settings: DocumentSettings | None = None,
        on_tokens: OnTokens = _unseen,
    ) -> "Conversation":  # fmt: skip
        """Go on with a saved chat; nothing of it is prefilled.

        Args:
            memory: "stored": the budget that the chat was begun with.
            max_tokens: None: what the chat was begun for.
            on_tokens: called with what of the damage is prefilled again, and all of it.

        Raises:
            DocumentMismatchError: another model, tokenizer or adapter; names the fields.
            DocumentError: there is none, or it is another document.
            DocumentDamagedError: its tokens or messages are damaged.
            As for the class.
        """
        settings = settings or DocumentSettings()
        chat = cls.__new__(cls)
        chat._begin(model, template, max_tokens, settings, verify)
        chat._reader = Reader(chat._loaded, settings)
        opened, chat._cache = open_chat(
            chat._reader, Path(path), chat._history, on_tokens, memory=memory,
            max_tokens=max_tokens, exact=exact, progress=chat._report_tokens,
            index_progress=chat._report_index,
            sealed=True if settings.key is not None else seal,
        )  # fmt: skip
        chat._base = chat._saved = opened
        chat._reader = opened.reader
        chat._policy, chat._memory = opened.policy, opened.budget(memory)
        chat.notices = list(chat._cache.notices)
        chat.counts.restored_tokens = chat._cache.get_seq_length()
        return chat

    def _begin(
        self, model: str | Path | LoadedModel | CausalLM, template: ChatTemplate | None,
        max_tokens: int | None, settings: DocumentSettings, verify: int | None,
    ) -> None:  # fmt: skip
        self._loaded = as_loaded(model)
        if self._loaded.tokenizer is None:
            raise ConfigError(
                f"{self._loaded.name} came without a tokenizer, and a chat needs its template; "
                "give a name or a folder, or what load() returned"
            )
        positions = inspect_model(self._loaded.model).max_positions
        most = positions if max_tokens is None else max_tokens
        self._history = ChatHistory(self._loaded, template or ChatTemplate(), most)
        self._history.render(self._history.message_of("?"))  # refused now, or never
        if not 2 <= most <= positions:
            raise ConfigError(
                f"max_tokens={max_tokens} must lie in 2 to {positions:,}, the positions of "
                f"{self._loaded.name}"
            )
        chunk = settings.prefill_chunk_size
        self._llm = LLM(self._loaded, prefill_chunk_size=chunk, verify=verify)
        self._chunk = chunk
        self.counts = ChatCounts()
        self._base: OpenDocument | None = None  # that the cache reads from
        self._saved: OpenDocument | None = None
        self._rewrites = False  # what was saved is damaged: save it all anew
        self._read_before = 0
        self._on_tokens: OnTokens = _unseen
        self._on_index: Callable[[float], object] = _unheard

    # What it is -------------------------------------------------------------------------------

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was said so far, the system prompt in front."""
        return [dict(each) for each in self._history.messages]

    @property
    def max_tokens(self) -> int:
        """Most tokens of the chat."""
        return self._history.max_tokens

    @property
    def attached(self) -> list[str]:
        """Texts that come in front of the next message."""
        return list(self._history.attached)

    @property
    def system(self) -> str | None:
        """The system prompt, where one was given. Another one makes the next turn prefill all."""
        return self._history.system

    @system.setter
    def system(self, text: str | None) -> None:
        self._history.set_system(text)

    @property
    def tokens(self) -> TokenIds:
        """The tokens that the cache holds, and the pictures among them."""
        return first_tokens(self._history.tokens, self._cache.get_seq_length())

    @property
    def cache(self) -> TieredCache:
        """The cache under the chat: its plan, its report, its counters."""
        return self._cache

    @property
    def folder(self) -> Path | None:
        """Where the chat was last saved, or came from."""
        return None if self._saved is None else self._saved.folder

    # Talking ----------------------------------------------------------------------------------

    def ask(
        self, text: str, sampling_params: SamplingParams | None = None, *,
        images: Sequence[Any] = (), videos: Sequence[Any] = (),
        on_text: Callable[[str], object] = lambda piece: None, on_tokens: OnTokens = _unseen,
        on_index: Callable[[float], object] = _unheard,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> ChatTurn:  # fmt: skip
        """Take a turn: a message of the user, and the answer to it.

        An answer that is stopped from outside stays, as far as it was shown. A turn that raises is
        given up: its message is not part of the chat, and what was prefilled of it is found again
        where it is asked once more.

        Args:
            sampling_params: None: as the model's own generation config has them; `max_tokens` is
                cut to what fits the chat.
            images, videos: for a model that sees, in front of the text: files, folders of frames,
                images of Pillow, or arrays (see `LLM.chat`).
            on_text: called with each piece of the answer.
            on_tokens: called with the tokens prefilled so far and all that are to be.
            on_index: called with the share of the index that is made, by policies that make one.
            should_stop: asked behind each token; true ends the answer.

        Raises:
            PromptError: the message is no text, a picture cannot be read, or the chat is full.
            ConfigError: `sampling_params` ask for several answers.
            StorageError: the disk is full, or failed.
        """
        media = [Media("image", each) for each in images]
        media += [Media("video", each) for each in videos]
        drawn = [draw(self._loaded, each) for each in media]
        message = self._history.message_of(text, drawn)
        prompt, ids = self._history.render(message, drawn)
        params = self._fitting(sampling_params or self._llm.get_default_sampling_params(), ids)
        before, is_shown = replace(self.counts), False

        def pass_on(row: int, piece: str) -> None:
            nonlocal is_shown
            is_shown = True
            on_text(piece)

        def answer(start: int) -> RequestOutput:
            on_tokens(0, len(ids) - start)
            self._on_tokens = lambda done, _: on_tokens(done - start, len(ids) - start)
            self._on_index = on_index
            batch = self._llm.batch_of([ids], params)
            [output] = self._llm.answer(
                batch, params, self._cache, on_text=pass_on, should_stop=should_stop
            )
            return output

        try:
            output = self._take_in(ids, answer)
        except DocumentDamagedError:
            if is_shown:
                raise
            output = self._take_in(ids, answer)  # without what was saved
        finally:
            self._on_tokens, self._on_index = _unseen, _unheard
        new = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        self._history.answered(message, output.text, prompt, ids, list(new), drawn)
        self.counts.turns += 1
        total = len(ids) + len(output.token_ids)
        return ChatTurn(
            output=output, memory=self._cache.report(),
            prefilled_tokens=self.counts.prefilled_tokens - before.prefilled_tokens,
            dropped_tokens=self.counts.dropped_tokens - before.dropped_tokens,
            read_bytes=self._read_bytes() - self._read_before,
            is_full=output.finish_reason == "length" and total >= self.max_tokens,
        )  # fmt: skip

    def attach(self, text: str, *, on_tokens: OnTokens = _unseen) -> int:
        """Put a text in front of the next message and prefill it now.

        Returns:
            Tokens prefilled.

        Raises:
            PromptError: it is empty, or the chat is full.
            StorageError: the disk is full, or failed.
        """
        if not text.strip():
            raise PromptError("the text is empty; attach another one")
        before, attached = self.counts.prefilled_tokens, list(self._history.attached)
        self._history.attached.append(text)

        def read(start: int) -> None:
            prefill(
                self._loaded, self._cache, ids, self._chunk,
                lambda done, total: on_tokens(done - start, total - start),
            )  # fmt: skip

        try:
            ids = self._history.render_beginning()
            self._room_behind(ids)
            self._take_in(ids, read)
        except BaseException:
            self._history.attached = attached
            raise
        return self.counts.prefilled_tokens - before

    def clear(self) -> None:
        """Forget all but the system prompt; the cache is empty then, and keeps its memory."""
        self._history.clear()
        self._go_back(0)

    def _fitting(self, params: SamplingParams, ids: list[int]) -> SamplingParams:
        """With no longer an answer than what fits."""
        if params.num_answers > 1:
            raise ConfigError("a chat goes on from one answer, not from several: set n=1")
        room = self._room_behind(ids)
        return replace(params, max_tokens=min(params.max_tokens or room, room))

    def _room_behind(self, ids: list[int]) -> int:
        """Tokens that fit behind a prompt.

        Raises:
            PromptError: none.
        """
        room = self.max_tokens - len(ids)
        if room < 1:
            held = self._cache.get_seq_length()
            raise PromptError(
                f"the chat is full: it holds {held:,} of {self.max_tokens:,} tokens, and with this "
                f"it would have {len(ids):,}; begin a new one, or say it in fewer words"
            )
        return room

    # The cache --------------------------------------------------------------------------------

    def _take_in(self, ids: TokenIds, work: Callable[[int], T]) -> T:
        """Go back to what the cache holds of `ids`, let `work` take in the rest, and count.

        A step that fails leaves what is sound of the prompt; damage leaves nothing.
        """
        start = self._go_back(shared_beginning(ids, self.tokens))
        self._cache.checkpoint()
        self._read_before = self._read_bytes()
        try:
            return work(start)
        except DocumentDamagedError:
            self._cache.reset()
            self._rewrites = True
            raise
        except BaseException:
            self._crop(len(ids))
            raise
        finally:
            held = self._cache.get_seq_length()
            if held >= start:
                prefilled = min(held, len(ids)) - start
                self.counts.prefilled_tokens += prefilled
                self.counts.decoded_tokens += held - start - prefilled
                self._history.holds(first_tokens(ids, held))
            else:
                self._count_dropped(start)

    def _go_back(self, length: int) -> int:
        """Keep so many first tokens, or none where the cache cannot go back; returns how many."""
        held = self._cache.get_seq_length()
        if length < held:
            self._crop(length)
            self._count_dropped(held)
        left: int = self._cache.get_seq_length()
        return left

    def _crop(self, length: int) -> None:
        with DeferredInterrupts():
            try:
                self._cache.rewind(length)  # or to what is sound, where a step has failed
            except PenstockError:  # what is to be there again cannot be read
                self._cache.reset()

    def _count_dropped(self, before: int) -> None:
        held = self._cache.get_seq_length()
        self.counts.dropped_tokens += before - held
        self._history.holds(first_tokens(self._history.tokens, held))

    def _read_bytes(self) -> int:
        stats = self._cache.stats
        return stats.prefill.read_bytes + stats.decode.read_bytes + stats.verify.read_bytes

    def _report_tokens(self, done: int) -> None:
        self._on_tokens(done, done)

    def _report_index(self, share: float) -> None:
        self._on_index(share)

    # The end ----------------------------------------------------------------------------------

    def save(self, path: str | Path, *, on_bytes: OnBytes = _unseen) -> int:
        """Store the chat in a folder, for `resume`: anew, or what is new since it was saved there.

        Either is one commit: what was stored before stays until the new is.

        Args:
            path: a new folder, or the one that this chat was saved in last or came from.
            on_bytes: called with the bytes stored so far and all of them.

        Returns:
            Bytes written.

        Raises:
            ConfigError: there is nothing to save yet, or the folder is there and not this chat's.
            CacheStateError: the policy forgets tokens, or the cache lies on a device.
            DocumentBusyError: another process has written to it since.
            StorageError: the disk is full, or failed; what was stored before is there.
        """
        if not self.tokens:
            raise ConfigError("there is nothing to save yet; say something first")
        try:
            saved, written = save_chat(
                self._reader, self._cache, self._history, Path(path), former=self._saved,
                policy=self._policy, memory=self._memory, keeps_units=not self._rewrites,
                on_bytes=on_bytes,
            )  # fmt: skip
        except BaseException:
            self._crop(self._cache.get_seq_length())  # reading back may have been cut in two
            raise
        former, self._saved, self._rewrites = self._saved, saved, False
        if former is not None and former is not self._base:
            former.stored.close()
        return written

    def close(self) -> None:
        """Give memory and files back; what was saved stays. A second call does nothing."""
        opened = {id(each): each for each in (self._base, self._saved) if each is not None}
        close_all(self._cache.close, *(each.stored.close for each in opened.values()))

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
