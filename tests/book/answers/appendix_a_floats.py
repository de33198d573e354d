"""Answers to exercises of appendix A: it has none so far."""
