"""Answers to the exercises before chapter 1: it has none."""
