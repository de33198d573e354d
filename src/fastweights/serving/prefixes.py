"""States after the beginnings of prompts, kept for those that begin alike."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import NamedTuple

from fastweights.arguments import check_integers
from fastweights.layers import LayerState


class PrefixKey(NamedTuple):
    """What stands for the first tokens of a text: how many, and their hash."""

    length: int
    digest: bytes


class PrefixHasher:
    """Hashes the beginnings of one text, each from the one before it."""

    def __init__(self) -> None:
        self._length, self._hash = 0, hashlib.sha256()

    def key(self, text: list[int], length: int) -> PrefixKey:
        """The key of the text's first ``length`` tokens."""
        if length < self._length:
            self._length, self._hash = 0, hashlib.sha256()
        self._hash.update(array("q", text[self._length : length]))
        self._length = length
        return PrefixKey(length, self._hash.digest())


class PrefixCache:
    """States by the tokens that they have read.

    Args:
        max_bytes: of all states and keys together; those that were not asked
            for the longest go first.
    """

    def __init__(self, max_bytes: int) -> None:
        check_integers(max_prefix_bytes=max_bytes)
        if max_bytes < 0:
            raise ValueError(
                f"max_prefix_bytes: got {max_bytes}, need an integer >= 0"
            )
        self.max_bytes, self.nbytes = max_bytes, 0
        self._kept: OrderedDict[PrefixKey, list[LayerState]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: PrefixKey, states: list[LayerState]) -> None:
        """Keep the states after these tokens, unless they are too large."""
        size = _nbytes(key, states)
        if key in self._kept or size > self.max_bytes:
            return
        self._kept[key] = states
        self.nbytes += size
        while self.nbytes > self.max_bytes:
            self.nbytes -= _nbytes(*self._kept.popitem(last=False))

    def longest(
        self, tokens: list[int], multiple_of: int = 1
    ) -> list[LayerState] | None:
        """The states after the longest prefix that is kept, if any.

        It is all of the tokens, or a multiple of ``multiple_of`` of them.
        """
        hasher, limit = PrefixHasher(), len(tokens)
        lengths = {key.length for key in self._kept if key.length <= limit}
        keys = [
            hasher.key(tokens, length)
            for length in sorted(lengths)
            if length % multiple_of == 0 or length == limit
        ]
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        return None


def _nbytes(key: PrefixKey, states: list[LayerState]) -> int:
    return len(key.digest) + sum(state.nbytes for state in states)
