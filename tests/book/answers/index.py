"""Answers to the first page's exercises: it has none."""
