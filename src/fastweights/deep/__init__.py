"""Layers whose fast weights are a network, or solve an equation.

    o, state = ttt(q, k, v, rate, start, norm, step_scale)
    o, state = titans(q, k, v, rate, momentum, g, start)
    o, state = lact(q, k, v, rates, (w0, w1, w2), momentum)
    o, state = mesa(q, k, v, g, beta, ridge)

The first three are instances of
:func:`fastweights.fast_weights.online_learner`, with an optimiser of
:mod:`fastweights.deep.optimisers`, and give what that loop over tokens gives;
here the tokens of a chunk go together, in products of matrices. Mesa's
weights are the optimum of a sum of squares, which it solves for. The code is
PyTorch's own, for any device, and torch.compile takes it in one graph, with
one step for all chunks of TTT and Titans from PyTorch 2.13 on; where a graph
is for any length they are one operator
(:mod:`fastweights.ops.common.any_length`).
Whole mini-batches of TTT-Linear and the steps of MesaNet's solver have a
Triton kernel besides.

q, k and v are [B, T, H, .] as everywhere in this library; ``start`` holds the
weights with which every sequence begins, learned by the outer model. A state
is [B, H, ...] and starts at zero: of a network it holds what the weights have
learned *since*, and what a chunk that is not complete needs. There
``position`` says how many tokens each row has read before, and ``lengths``
how many it has now; mesa takes packed sequences instead.
"""

from fastweights.deep.lact import lact
from fastweights.deep.mesa import mesa
from fastweights.deep.newton_schulz import newton_schulz
from fastweights.deep.titans import titans
from fastweights.deep.ttt import ttt

__all__ = ["lact", "mesa", "newton_schulz", "titans", "ttt"]
