"""What a caller calls, and what PyTorch is told of it."""

from fastweights.ops.recurrence import (
    choose_backend,
    linear_recurrence,
    record_backends,
)

__all__ = ["choose_backend", "linear_recurrence", "record_backends"]
