"""The backends "torch" and "loop": what runs where the kernels do not.

The recurrence, a frame around :mod:`fastweights.reference.chunkwise`; its
steps for decode_step; the short convolution; the selective scan. Each has the
functions that its operator asks of a backend, as the kernels have. What a
network or MesaNet does in PyTorch is in :mod:`fastweights.deep`.
"""
