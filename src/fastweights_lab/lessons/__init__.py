"""Kernels that chapter 3 prints; the library's own do more and are longer."""
