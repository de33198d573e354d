"""The backends "torch" and "loop": what runs where the kernels do not.

The recurrence, a frame around :mod:`fastweights.reference.chunkwise`; its
steps for decode_step; the short convolution; the selective scan. A module has
the functions that the kernels' module of its name has. What a network or the
Mesa layer does in PyTorch is in :mod:`fastweights.deep`.
"""
