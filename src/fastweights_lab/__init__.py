"""The laboratory of the book: what chapters show, and how it was measured.

The library never imports it; ``DESIGN.md`` says what belongs where.
"""
