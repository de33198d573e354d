"""Triton kernels. Importing this package does not import Triton.

``README.md`` beside this file shows how they work together, ``TUNING.md``
why they are as they are.
"""
