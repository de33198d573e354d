"""What a rank's schedule hands over, for other ranks' states to come in.

Without Triton: :mod:`fastweights.ranks.exchange` imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class ComposeStates(NamedTuple):
    """The tensors of compose_kernel, or in a schedule their specs."""

    entering: Any  # states that enter a call's sequences
    borders: Any  # states that pass the borders of their segments
    leaving: Any  # states that leave the sequences
    maps: Any  # the segments' maps; None: they are all ones
    products: Any  # of the maps up to each border


class LaunchWith(Protocol):
    """Launch a kernel, with other tensors in place of those named."""

    def __call__(self, **tensors: Tensor) -> None: ...


class ExchangeLaunches(NamedTuple):
    """The launches that a schedule leaves to the exchange of states."""

    compose: LaunchWith
    overlap: Callable[[], None]  # while tensors travel
    add_arriving: LaunchWith


StateExchange = Callable[[ComposeStates, ExchangeLaunches], None]
