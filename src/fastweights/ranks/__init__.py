"""One sequence on many processes, each with a shard of its tokens."""
