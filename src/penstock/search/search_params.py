"""SearchParams: how wide and how far a step-wise beam search goes, and how it samples."""

from dataclasses import dataclass

from penstock.core.errors import ConfigError, PromptError
from penstock.generation.sampling import check_kinds, make_plain
from penstock.search.draws import check_draws


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchParams:
    """Settings of one search.

    `beams` candidates are sampled in each step, `width` for each of `beams // width` survivors.
    With a width of 1 nothing is pruned: best of `beams` independent samples.

    Raises:
        ConfigError: a field is out of its range, or fields do not go together.
    """

    beams: int = 16
    """Candidates of a step."""
    width: int = 2
    """Continuations sampled for each surviving beam."""
    step_tokens: int = 64
    """Most new tokens of a step."""
    delimiter: str | None = None
    """A beam's step ends with the token whose text completes this; None: by length alone."""
    max_new_tokens: int = 256
    """Most new tokens of a beam."""
    temperature: float = 1.0
    """Divides the logits; 0 (greedy) goes with one beam only."""
    top_k: int = 0
    """Sample among this many most probable tokens; 0 is all of them."""
    top_p: float = 1.0
    """Sample among the most probable tokens that hold this share of the mass, in (0, 1]."""
    seed: int | None = None
    """0 to 2**64 - 1; None draws one, which the output names."""
    stop: str | tuple[str, ...] | None = ()
    """A beam is finished before the first of these strings, or of those that the model's own
    `generation_config` has; None: there are none."""
    ignore_end: bool = False
    """Go on behind the end token and the model's own stop strings, as a measurement of a given
    length does."""

    def __post_init__(self) -> None:
        counts = ("beams", "width", "step_tokens", "max_new_tokens")
        whole, real = (*counts, "top_k", "seed"), ("temperature", "top_p")
        check_kinds(self, whole=whole, real=real)
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.beams % self.width:
            raise ConfigError(
                f"beams={self.beams} cannot be shared out among survivors with width={self.width} "
                f"continuations each; take a multiple of {self.width}"
            )
        check_draws(self.temperature, self.top_k, self.top_p)
        if self.beams > 1 and (self.temperature == 0 or self.top_k == 1):
            why = "top_k=1" if self.temperature else "temperature=0"
            raise ConfigError(
                f"{why} makes all continuations of a beam equal, so that {self.beams} beams search "
                "nothing; take a temperature above 0 and top_k=0, or one beam"
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed={self.seed} must lie in 0 to 2**64 - 1")
        if self.delimiter == "":
            raise ConfigError("delimiter is an empty string, which would end every step at once")
        if any(not text for text in self.stop_texts):
            raise ConfigError("stop holds an empty string, which would end every beam at once")
        make_plain(self, whole=whole, real=real)

    @property
    def survivors(self) -> int:
        """Beams kept at the end of a step, the finished ones counted: the paper's beam size."""
        return self.beams // self.width

    @property
    def most_steps(self) -> int | None:
        """Steps of a search of full length; None with a delimiter, which ends steps early."""
        return None if self.delimiter else -(-self.max_new_tokens // self.step_tokens)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def check_room(prompt_tokens: int, params: SearchParams, max_tokens: int) -> None:
    """Refuse a prompt that is empty, or too long with `max_new_tokens` behind it.

    Args:
        max_tokens: most tokens of a sequence, prompt included.

    Raises:
        PromptError: says by how many tokens.
    """
    if prompt_tokens < 1:
        raise PromptError("the prompt is empty: it has zero tokens")
    over = prompt_tokens + params.max_new_tokens - max_tokens
    if over > 0:
        raise PromptError(
            f"the prompt has {prompt_tokens:,} tokens and {params.max_new_tokens:,} more are asked "
            f"for, but there is room for {max_tokens:,}; take away {over:,}"
        )


def check_step(prompt_tokens: int, params: SearchParams, max_positions: int) -> None:
    """Refuse a step that is longer than the context behind the prompt.

    A step may be longer than `max_new_tokens`: then it is the only one.

    Raises:
        ConfigError: says how long it may be.
    """
    left = max_positions - prompt_tokens
    if params.step_tokens > left:
        raise ConfigError(
            f"step_tokens={params.step_tokens:,} is longer than the context: the model has "
            f"{max_positions:,} positions and the prompt takes {prompt_tokens:,}; take at most "
            f"{max(left, 0):,}"
        )
