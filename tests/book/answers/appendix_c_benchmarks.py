"""Answers to exercises of appendix C: it has none."""
