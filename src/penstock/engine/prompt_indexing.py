"""PromptIndexing: when the index of a prompt is made, and reports of how far that is."""

from collections.abc import Callable, Sequence

from penstock.engine.layer import Layer


class PromptIndexing:
    """Makes all layers' indexes when a prompt of known length is in, and says how far that is.

    A cache does not know which forward pass is the prompt's last one. Without `prompt_tokens` every
    layer makes its index in the first decode step, which tells of its progress too.
    """

    def __init__(
        self, num_layers: int, prompt_tokens: int | None, progress: Callable[[float], None] | None
    ) -> None:
        """Keep what is known.

        Args:
            prompt_tokens: of a row, padding included; None where they are not known.
            progress: called with the share of the work that is done, from 0 to 1.
        """
        self._num_layers, self._prompt_tokens = num_layers, prompt_tokens
        self._progress = progress

    def report(self, layer: int, share: float) -> None:
        """So much of a layer's index is made, and all of those before it; share: from 0 to 1."""
        if self._progress is not None:
            self._progress((layer + share) / self._num_layers)

    def after_step(self, layers: Sequence[Layer]) -> None:
        """Make the indexes if that was the prompt.

        Raises:
            StorageError: the prompt could not be read, or its index not be written.
        """
        if layers[-1].length == self._prompt_tokens:
            for layer in layers:
                layer.make_index()
