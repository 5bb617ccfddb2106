"""ServerSettings: what a server allows, beside what its engine does."""

from dataclasses import dataclass

from penstock.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Limits and names of one server.

    Raises:
        ConfigError: a limit is out of its range.
    """

    model_name: str
    """What clients call the model; no path."""
    api_key: str | None = None
    """That every request must bring, but for /health and the page's own files; None: none."""
    cors_origins: tuple[str, ...] = ()
    """Origins of other pages that may ask; "*" is every one."""
    allowed_hosts: tuple[str, ...] = ("*",)
    """Values of the Host header that are answered; "*" is every one. A page on the web can point a
    name of its own at this machine, and its requests name that."""
    max_model_len: int | None = None
    """What clients are told, where it is less than the model's positions; the engine's own limit
    counts."""
    max_body_bytes: int = 32 << 20
    max_images: int = 8
    """Of a request."""
    max_prompts: int = 64
    """Of a request, answers to each counted."""
    max_answer_tokens: int = 1024
    """Of an answer, where a request does not say. Memory is kept for so many."""
    max_request_s: float = 3600.0
    """From arrival to the end of the answer."""
    keep_alive_s: float = 10.0
    """A stream without news gets a comment so often: proxies cut silent ones."""

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes", "max_prompts", "max_answer_tokens", "max_request_s", "keep_alive_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be more than 0")
        if self.max_images < 0:
            raise ConfigError(f"max_images={self.max_images} must be at least 0")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key is empty; give one, or none")
