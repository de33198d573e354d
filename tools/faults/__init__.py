"""Faults of one line, which the tests must notice: see mutants.py.

A fault has a name; the file, the text to replace (its first occurrence) and
what replaces it; and a file of tests, if it is not the one in TESTS.
"""
