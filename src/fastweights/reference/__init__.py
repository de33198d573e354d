"""The recurrences in plain PyTorch, written to be read and to judge by."""
