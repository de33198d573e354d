"""Layers whose fast weights are a network, or solve an equation.

    o, state = ttt(q, k, v, rate, layers, norm, rows)
    o, state = titans(q, k, v, rate, momentum, g, layers)
    o, state = lact(q, k, v, rates, matrices, momentum)
    o, state = mesa(q, k, v, g, beta, ridge)

Each is an instance of :func:`fastweights.fast_weights.online_learner`, with
an optimiser of :mod:`fastweights.deep.optimisers`, and gives what that loop
over tokens gives; here the tokens of a chunk go together, in products of
matrices. The code is PyTorch's own, for any device, and torch.compile takes
it in one graph, with one step for all chunks of TTT and Titans from PyTorch
2.13 on; where a graph is for any length they are one operator
(:mod:`fastweights.ops.any_length`). Whole mini-batches of TTT-Linear have a
Triton kernel besides.

q, k and v are [B, T, H, .] as everywhere in this library; start holds the
weights with which every sequence begins, learned by the outer model. A state
is [B, H, ...] and starts at zero: it holds what the weights have learned
*since*, and what a chunk that is not complete needs. ``position`` says how
many tokens each row has read before, and ``lengths`` how many it has now.
"""

from fastweights.deep.lact import lact
from fastweights.deep.mesa import mesa
from fastweights.deep.newton_schulz import newton_schulz
from fastweights.deep.titans import titans
from fastweights.deep.ttt import ttt

__all__ = ["lact", "mesa", "newton_schulz", "titans", "ttt"]
