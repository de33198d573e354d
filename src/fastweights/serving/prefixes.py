"""States after the beginnings of prompts, kept for those that begin alike."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from fastweights.arguments import check_integers
from fastweights.layers import LayerState


class Prefixes:
    """States by the tokens that they have read, of so many bytes at most.

    Args:
        most_bytes: of all states together; those that were not asked for
            the longest go first.
    """

    def __init__(self, most_bytes: int) -> None:
        check_integers({"prefix_bytes": most_bytes})
        if most_bytes < 0:
            raise ValueError(
                f"prefix_bytes: got {most_bytes}, need an integer >= 0"
            )
        self.most_bytes, self.nbytes = most_bytes, 0
        self._kept: OrderedDict[bytes, list[LayerState]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, tokens: list[int], states: list[LayerState]) -> None:
        """Keep the states after these tokens, if that many bytes may be."""
        key = _bytes(tokens)
        if key in self._kept or _size(states) > self.most_bytes:
            return
        self._kept[key] = states
        self.nbytes += _size(states)
        while self.nbytes > self.most_bytes:
            _, gone = self._kept.popitem(last=False)
            self.nbytes -= _size(gone)

    def longest(
        self, tokens: list[int], every: int = 1
    ) -> list[LayerState] | None:
        """The states after most of these tokens from the first on, if any.

        Args:
            every: only those after all of the tokens, or after a multiple
                of so many.
        """
        text = _bytes(tokens)
        fit = [
            key
            for key in self._kept
            if text.startswith(key)
            and (len(key) % (8 * every) == 0 or key == text)
        ]
        if not fit:
            return None
        key = max(fit, key=len)
        self._kept.move_to_end(key)
        return self._kept[key]


def _bytes(tokens: list[int]) -> bytes:
    return array("q", tokens).tobytes()


def _size(states: list[LayerState]) -> int:
    return sum(state.nbytes for state in states)
