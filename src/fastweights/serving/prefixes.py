"""States after the beginnings of prompts, kept for those that begin alike."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from fastweights.arguments import check_integers
from fastweights.layers import LayerState


class Prefixes:
    """States by the tokens that they have read.

    Args:
        max_bytes: of all states together; those that were not asked for
            the longest go first.
    """

    def __init__(self, max_bytes: int) -> None:
        check_integers({"prefix_bytes": max_bytes})
        if max_bytes < 0:
            raise ValueError(
                f"prefix_bytes: got {max_bytes}, need an integer >= 0"
            )
        self.max_bytes, self.nbytes = max_bytes, 0
        self._kept: OrderedDict[bytes, list[LayerState]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, tokens: list[int], states: list[LayerState]) -> None:
        """Keep the states after these tokens, unless they are too large."""
        key = _bytes(tokens)
        if key in self._kept or _size(states) > self.max_bytes:
            return
        self._kept[key] = states
        self.nbytes += _size(states)
        while self.nbytes > self.max_bytes:
            _, gone = self._kept.popitem(last=False)
            self.nbytes -= _size(gone)

    def longest(
        self, tokens: list[int], multiple_of: int = 1
    ) -> list[LayerState] | None:
        """Return the states after the longest prefix that is kept, if any.

        It is all of the tokens, or a multiple of ``multiple_of`` of them.
        """
        text = _bytes(tokens)
        size = multiple_of * len(_bytes([0]))
        fit = [
            key
            for key in self._kept
            if text.startswith(key) and (len(key) % size == 0 or key == text)
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
