"""What operators share: a backend, rows of a pool, what PyTorch is told."""
