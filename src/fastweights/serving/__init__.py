"""What serves: an engine, and the steps in place that it is made of.

:class:`Engine` answers requests that come and go with a model, on the rows of
a :class:`StatePool`.

:func:`fastweights.decode_step` continues the recurrence itself, and
:class:`StatePool` a model's whole states. mLSTM, normalised linear attention
and Mamba's selective scan have steps of their own.

    phi = fw.feature_maps.elu1
    o, state = fw.linear_attention(q, k, v, feature_map=phi, normalize=True)
    linear_attention_step(q, k, v, state=state, feature_map=phi)

Of the modules ``engine`` decides which request reads or steps, and
``model_runner`` calls the model for them. A request is in ``request``, states
kept for others that begin alike in ``prefixes``; operators' steps are in
:mod:`fastweights.ops`, the pool in :mod:`fastweights.models`. These modules
share what others may not touch: a request calls its engine's methods with an
underscore, engine and runner set its ``row`` and ``num_drawn``, and look into
the pool's ``free`` and ``tokens_read``.
"""

from fastweights.models.pool import StatePool
from fastweights.ops.decode import NARROW_STATE_DTYPES, decode_step
from fastweights.ops.mlstm import mlstm_step
from fastweights.ops.normaliser import linear_attention_step
from fastweights.ops.selective import selective_step
from fastweights.serving.engine import Engine
from fastweights.serving.request import Request

__all__ = [
    "NARROW_STATE_DTYPES",
    "Engine",
    "Request",
    "StatePool",
    "decode_step",
    "linear_attention_step",
    "mlstm_step",
    "selective_step",
]
