"""One sequence on many processes, each with a stretch of its tokens."""
