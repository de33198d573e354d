"""What a caller calls, and what PyTorch is told of it."""

from fastweights.ops.backends import choose_backend, record_backends
from fastweights.ops.recurrence import linear_recurrence

__all__ = ["choose_backend", "linear_recurrence", "record_backends"]
