"""The recurrences in plain PyTorch, written to be read and to judge by.

    S = torch.zeros(1, 2, 16, 16)                           # [B, H, K, V]
    o, S = steps.scan(steps.linear, S, q, k, v)             # a token at a time
    close(parallel.parallel(q, k, v, scale=1.0), o, tol=1e-5)   # all at once

Steps go by a token, parallel forms by all of them, chunkwise ones by a chunk;
dtypes are those of the inputs. :mod:`.chunkwise` is also the formula that
:mod:`fastweights.torch_backend` runs.
"""
