"""The operators that a caller calls, and what PyTorch is told of them.

The family:

    members              kda and the others, each a call of linear_recurrence
    mlstm, normaliser    those that divide by a sum of weights
    recurrence           linear_recurrence; the way of a call to the kernels
    recurrence_operator  it as an operator, of whole sequences
    recurrence_on_ranks  it of sequences that ranks share
    decode               a few tokens in place, also in rows of a pool

Beside it:

    convolution, output_norm  what layers have before and behind it
    selective                 Mamba's scan
    ttt, mesa                 kernels of fastweights.deep, which calls them

Below them, in ``common``:

    backends, batch_invariance       which one runs, and in which order it adds
    registration, any_length, flops  what PyTorch is told of an operator
    rows                             which rows of a pool a batch has
"""

from fastweights.ops.common.backends import record_backends, resolve_backend
from fastweights.ops.recurrence import linear_recurrence

__all__ = ["linear_recurrence", "record_backends", "resolve_backend"]
