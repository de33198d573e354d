"""The kernels of linear_recurrence and its backward, and their host code.

One family: a member is a gate (none, one per head, one per channel) and a
rule (additive; delta, which corrects; or with a key of its own that erases).
Linear attention is none and additive, GLA a gate per channel, DeltaNet the
delta rule, Gated DeltaNet that with a gate per head, KDA with one per channel.

intra           inside a chunk: scores, the inverse, q and k with their decay
gates           decays within a chunk, which the kernels of intra and scan call
inverse         the delta rule's inverse, which intra calls
scan            from chunk to chunk: the state, and the outputs
segments        what a sequence may be cut into, and where borders lie
compose         from segment to segment: the states, through the maps
intra_backward  the gradients inside a chunk; scan has the others
settings        what a kind of call and its lengths decide: tiles, segments
stages          what is launched, in order, on which tensors
schedule        launches it: addresses for compiled kernels
state_passing   what it hands over where other ranks have a call's other tokens
backend         takes the arguments
"""
