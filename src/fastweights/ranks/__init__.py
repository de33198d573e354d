"""One sequence on many processes, each with a shard of its tokens.

``group`` says who shares a sequence, ``shard`` which tokens and states each
one has. ``prefix`` composes maps over ranks; ``exchange`` does while kernels
run.
"""
