"""The record of a search: the tree of its candidates, its steps, and the beams it ends with."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from penstock.core.ledger import MemoryReport
from penstock.engine.beams.decoding import StepTraffic

Fate = Literal["kept", "finished", "pruned"]
""" "kept" goes on in the next step; "finished" was selected and is complete."""
SearchFinish = Literal["stop", "length", "interrupted"]
""" "stop": an end token or a stop text; "length": `max_new_tokens`; or Ctrl-C came first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchNode:
    """One candidate of one step."""

    id: int
    """Its place in the tree's list of nodes."""
    parent: int | None
    """The candidate that it continues; None: the prompt."""
    step: int
    """Counts from 0."""
    token_ids: list[int]
    """Sampled in this step."""
    text: str
    """Of this step, up to a stop text; empty without a tokenizer."""
    text_start: int
    """Character of the whole text behind the prompt at which it begins: the end of the parent's, or
    before it where a character or a stop text lies across both steps."""
    num_tokens: int
    """Behind the prompt, up to the end of this step."""
    score: float
    """Of the whole continuation; minus infinity: the scorer refused it."""
    log_probability: float
    """Sum over the whole continuation."""
    fate: Fate


@dataclass(frozen=True, slots=True)
class SearchTree:
    """All candidates of a search, in the order in which they were sampled."""

    nodes: list[SearchNode] = field(default_factory=list)

    def __iter__(self) -> Iterator[SearchNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def of_step(self, step: int) -> list[SearchNode]:
        """The candidates of one step."""
        return [node for node in self.nodes if node.step == step]

    def path(self, node_id: int) -> list[SearchNode]:
        """The nodes from the first step to this one."""
        path = []
        at: int | None = node_id
        while at is not None:
            path.append(self.nodes[at])
            at = self.nodes[at].parent
        return path[::-1]

    def token_ids(self, node_id: int) -> list[int]:
        """All tokens behind the prompt up to a node."""
        return [token for node in self.path(node_id) for token in node.token_ids]

    def text(self, node_id: int) -> str:
        """The text behind the prompt up to a node, and up to a stop text."""
        text = ""
        for node in self.path(node_id):
            text = text[: node.text_start] + node.text
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one step did. Times are wall-clock seconds."""

    step: int
    """Counts from 0."""
    num_candidates: int
    num_kept: int
    """Selected, to go on."""
    num_finished: int
    """Selected, and complete."""
    new_tokens: int
    """Sampled by all candidates together."""
    group_sizes: list[int]
    """Candidates that ran together, in the order of their turns."""
    traffic: StepTraffic
    decode_s: float
    """Of forking and running the candidates."""
    score_s: float
    """Of rating them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchBeam:
    """One answer of a search."""

    text: str
    """Up to the first stop text; empty without a tokenizer."""
    token_ids: list[int]
    """Behind the prompt, an end token included."""
    score: float
    log_probability: float
    """Sum over `token_ids`, under the model's own distribution."""
    finish_reason: SearchFinish
    node: int
    """Its last candidate in the tree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPlace:
    """Where the keys and values of a search lay."""

    strategy: str
    memory: MemoryReport
    """Fast memory."""
    store: str
    """The slow tier, in words."""
    simulated: str | None
    """Name of the device whose times were simulated, or None for a real one."""
    notices: tuple[str, ...]
    """What a user should know about this search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOutput:
    """What a search found, and what it took."""

    prompt: str
    """Empty without a tokenizer."""
    prompt_token_ids: list[int]
    beams: list[SearchBeam]
    """Best first."""
    tree: SearchTree
    steps: list[StepRecord]
    settings: Mapping[str, object]
    """Of `SearchParams`, by name, the seed that was used included."""
    scorer: str
    prefill_s: float
    wall_s: float
    """Prefill included."""
    interrupted: bool
    """Whether Ctrl-C or an error came before the end."""
    place: "SearchPlace | None" = None
    """Where the beams lay; None where the decoder does not say."""

    @property
    def best(self) -> SearchBeam | None:
        """The best answer; None: nothing was found before the search was interrupted."""
        return self.beams[0] if self.beams else None

    @property
    def traffic(self) -> StepTraffic:
        """Of all steps together."""
        total = StepTraffic()
        for record in self.steps:
            total.add(record.traffic)
        return total

    @property
    def new_tokens(self) -> int:
        """Sampled in all, those of pruned candidates included."""
        return sum(record.new_tokens for record in self.steps)

    @property
    def decode_s(self) -> float:
        """Time of all steps, ratings left out."""
        return sum(record.decode_s for record in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of decoding, all candidates together."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data; a score of minus infinity becomes None, as JSON wants it."""
        plain = asdict(self)
        plain["traffic"] = asdict(self.traffic)
        plain["new_tokens"] = self.new_tokens
        plain["tokens_per_s"] = self.tokens_per_s
        plain["tree"] = plain["tree"]["nodes"]
        for node in plain["tree"]:
            node["score"] = None if node["score"] == float("-inf") else node["score"]
        return plain


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchStep:
    """What `on_step` gets after each step."""

    record: StepRecord
    most_steps: int | None
    """Steps of a search of full length; None with a delimiter, which ends steps early."""
    nodes: list[SearchNode]
    """This step's candidates, in the order in which they were sampled."""
    tree: SearchTree
    """So far."""
    num_live: int
    """Beams that go on."""
    num_finished: int
    """Beams that are complete, those of earlier steps included."""
