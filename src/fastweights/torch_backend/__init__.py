"""The backend "torch": what runs where the kernels do not.

A module for each operator that has kernels: the recurrence, a frame around
:mod:`fastweights.reference.chunkwise`; the short convolution; the selective
scan. Each has ``forward`` and ``backward`` as the kernels' module has them.
"""
