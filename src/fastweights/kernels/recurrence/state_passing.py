"""What a schedule on ranks hands over, for other ranks' states to come in.

Without Triton, which :mod:`fastweights.ranks.exchange` does not import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

X = TypeVar("X")  # a Tensor, or in a schedule its spec


class StatePassing(NamedTuple, Generic[X]):
    """The tensors of compose_kernel and of add_arriving_kernel."""

    entering: X  # what enters a call's sequences
    borders: X  # passes the borders of their segments
    leaving: X  # and leaves them
    maps: X | None  # of the segments
    products: X | None  # of those maps


class LaunchWith(Protocol):
    """Launch a kernel, with other tensors in place of those named."""

    def __call__(self, **tensors: Tensor) -> None: ...


class ExchangeStates(Protocol):
    """Ask the other ranks what enters, and launch what waits for that.

    ``launch_meanwhile`` is for the time in which tensors travel.
    """

    def __call__(
        self,
        passing: StatePassing[Tensor],
        launch_compose: LaunchWith,
        launch_meanwhile: Callable[[], None],
        launch_add_arriving: LaunchWith,
    ) -> None: ...
