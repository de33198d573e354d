"""The laboratory of the book: what chapters show, and how it was measured.

The library never imports it, but for ``python -m fastweights`` and
``fastweights.train``; ``DESIGN.md`` says what belongs where.
"""
