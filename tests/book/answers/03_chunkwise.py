"""Answers to chapter 3's exercises, and what their checks are to say."""


# %% ex-blank passes
def linear_chunkwise(q, k, v, S0, C):
    T = len(q)
    rows = torch.nn.functional.pad
    q, k, v = (
        rows(x, (0, 0, 0, -T % C)).unflatten(0, (-1, C)) for x in (q, k, v)
    )
    added = k.mT @ v
    ends = S0 + added.cumsum(0)
    o = q @ (ends - added) + (q @ k.mT).tril() @ v
    return o.flatten(0, 1)[:T], ends[-1]


# %% ex-blank not yet: is this a loop over tokens
def linear_chunkwise(q, k, v, S0, C):
    outputs = []
    for a, b, c in zip(q, k, v):
        S0 = S0 + b[:, None] @ c[None, :]
        outputs.append(a[None, :] @ S0)
    return torch.cat(outputs), S0


# %% ex-blank not yet: as large as a state per token
def linear_chunkwise(q, k, v, S0, C):
    states = S0 + torch.einsum("tk,tv->tkv", k, v).cumsum(0)
    return torch.einsum("tk,tkv->tv", q, states), states[-1]


# %% ex-blank not yet: scores are needed only within a chunk
def linear_chunkwise(q, k, v, S0, C):
    return q @ S0 + (q @ k.T).tril() @ v, S0 + k.T @ v


# %% ex-blank not yet: C = 16, o: relative error
def linear_chunkwise(q, k, v, S0, C):
    outputs = []
    for a, b, c in zip(q.split(C), k.split(C), v.split(C)):
        S0 = S0 + b.T @ c
        outputs.append(a @ S0 if C == 1 else a @ S0 + (a @ b.T).tril() @ c)
    return torch.cat(outputs), S0


# %% ex-blank not yet: state: relative error
def linear_chunkwise(q, k, v, S0, C):
    T, S_n, outputs = len(q), S0, []
    q, k, v = (
        torch.cat([x, x[:1].expand(-T % C, -1)]).split(C) for x in (q, k, v)
    )
    for a, b, c in zip(q, k, v):
        outputs.append(a @ S_n + (a @ b.T).tril() @ c)
        S_n = S_n + b.T @ c
    return torch.cat(outputs)[:T], S_n


# %% ex-two-gpus passes
def join_segments(results, queries):
    states = torch.stack([state for _, state in results])
    before = states.cumsum(0) - states
    outputs = [
        o + (q.transpose(1, 2) @ S).transpose(1, 2)
        for (o, _), q, S in zip(results, queries, before)
    ]
    return torch.cat(outputs, 1), states.shape[-2] * states.shape[-1]


# %% ex-two-gpus not yet: relative error
def join_segments(results, queries):
    return torch.cat([o for o, _ in results], 1), results[0][1][0, 0].numel()


# %% ex-two-gpus not yet: what later segments lack is one state
def join_segments(results, queries):
    S_in, outputs = 0 * results[0][1], []
    for (o, state), q in zip(results, queries):
        outputs.append(o + torch.einsum("bthk,bhkv->bthv", q, S_in))
        S_in = S_in + state
    return torch.cat(outputs, 1), o.shape[1] * o.shape[3]


# %% ex-balance passes
def balanced_chunk(K, V, peak, copy):
    low, high = 1e-3, 1e9
    for _ in range(200):
        C = (low * high) ** 0.5
        arithmetic = (2 * C * (K + V) + 4 * K * V) / peak
        traffic = (6 * (K + V) + 16 * K * V / C) / copy
        low, high = (low, C) if arithmetic > traffic else (C, high)
    return C, "larger"


# %% ex-balance not yet: does not become 'smaller'
def balanced_chunk(K, V, peak, copy):
    w, m, r = K + V, K * V, peak / copy
    half = (1.5 * r * w - m) / w
    return half + math.sqrt(half**2 + 8 * r * m / w), "smaller"


# %% ex-balance not yet: arithmetic takes .* times as long as traffic
def balanced_chunk(K, V, peak, copy):
    return 8 * K * V / (K + V), "larger"


# %% ex-balance not yet: is not a length
def balanced_chunk(K, V, peak, copy):
    w, m, r = K + V, K * V, peak / copy
    half = (1.5 * r * w - m) / w
    return half - math.sqrt(half**2 + 8 * r * m / w), "larger"


# %% ex-affine-scan passes
def affine_scan(a, b):
    items = [(torch.diag(x), y[:, None]) for x, y in zip(a, b)]
    prefixes = scans.prefix_scan(scans.compose, items)
    return torch.stack([B[:, 0] for _, B in prefixes])


# %% ex-affine-scan not yet: do not divide by a factor
def affine_scan(a, b):
    decay = a.cumprod(0)
    parts = scans.prefix_scan(torch.add, list(b / decay))
    return decay * torch.stack(parts)


# %% ex-affine-scan not yet: was not used
def affine_scan(a, b):
    x, outputs = torch.zeros_like(b[0]), []
    for factor, added in zip(a, b):
        x = factor * x + added
        outputs.append(x)
    return torch.stack(outputs)


# %% ex-affine-scan not yet: relative error
def affine_scan(a, b):
    def combine(x, y):
        return x[0] * y[0], x[0] * y[1] + x[1]

    prefixes = scans.prefix_scan(combine, list(zip(a, b)))
    return torch.stack([B for _, B in prefixes])


# %% ex-triton passes
@triton.jit
def chunk_sum_kernel(
    k, v, out, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr
):
    i_t = tl.program_id(0)
    o_t = i_t * BT + tl.arange(0, BT)
    o_k = tl.arange(0, K)[:, None]
    o_v = tl.arange(0, V)[None, :]
    b_kt = tl.load(k + o_t[None, :] * K + o_k, mask=o_t[None, :] < T, other=0)
    b_v = tl.load(v + o_t[:, None] * V + o_v, mask=o_t[:, None] < T, other=0)
    tl.store(out + i_t * K * V + o_k * V + o_v, tl.dot(b_kt, b_v))


# %% ex-triton not yet: what lies behind the last token was read
@triton.jit
def chunk_sum_kernel(
    k, v, out, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr
):
    i_t = tl.program_id(0)
    o_t = (i_t * BT + tl.arange(0, BT))[:, None]
    b_k = tl.load(k + o_t * K + tl.arange(0, K))
    b_v = tl.load(v + o_t * V + tl.arange(0, V))
    o_k = tl.arange(0, K)[:, None]
    b_S = tl.dot(tl.trans(b_k), b_v)
    tl.store(out + (i_t * K + o_k) * V + tl.arange(0, V), b_S)


# %% ex-triton not yet: relative error
@triton.jit
def chunk_sum_kernel(
    k, v, out, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr
):
    i_t = tl.program_id(0)
    o_t = tl.arange(0, BT)[:, None]
    b_k = tl.load(k + o_t * K + tl.arange(0, K))
    b_v = tl.load(v + o_t * V + tl.arange(0, V))
    o_k = tl.arange(0, K)[:, None]
    b_S = tl.dot(tl.trans(b_k), b_v)
    tl.store(out + (i_t * K + o_k) * V + tl.arange(0, V), b_S)


# %% ex-chunk-backward passes
def chunkwise_backward(q, k, v, do, C):
    T = len(q)
    rows = torch.nn.functional.pad
    q, k, v, do = (
        rows(x, (0, 0, 0, -T % C)).unflatten(0, (-1, C)) for x in (q, k, v, do)
    )
    wrote, asked = k.mT @ v, q.mT @ do
    S = wrote.cumsum(0) - wrote
    R = asked.flip(0).cumsum(0).flip(0) - asked
    A, dA = (q @ k.mT).tril(), (do @ v.mT).tril()
    grads = (
        do @ S.mT + dA @ k,
        v @ R.mT + dA.mT @ q,
        k @ R + A.mT @ do,
    )
    return tuple(x.flatten(0, 1)[:T] for x in grads)


# %% ex-chunk-backward not yet: is this a loop over tokens
def chunkwise_backward(q, k, v, do, C):
    S, R = torch.zeros(2, k.shape[1], v.shape[1]).to(k)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for t in range(len(q)):
        S = S + k[t, :, None] @ v[t, None]
        dq[t] = S @ do[t]
    for t in reversed(range(len(q))):
        R = R + q[t, :, None] @ do[t, None]
        dk[t], dv[t] = R @ v[t], R.T @ k[t]
    return dq, dk, dv


# %% ex-chunk-backward not yet: as large as a state per token
def chunkwise_backward(q, k, v, do, C):
    S = torch.einsum("tk,tv->tkv", k, v).cumsum(0)
    R = torch.einsum("tk,tv->tkv", q, do).flip(0).cumsum(0).flip(0)
    return (
        torch.einsum("tkv,tv->tk", S, do),
        torch.einsum("tkv,tv->tk", R, v),
        torch.einsum("tkv,tk->tv", R, k),
    )


# %% ex-chunk-backward not yet: scores are needed only within a chunk
def chunkwise_backward(q, k, v, do, C):
    A, dA = (q @ k.T).tril(), (do @ v.T).tril()
    return dA @ k, dA.T @ q, A.T @ do


# %% ex-chunk-backward not yet: C = 16, dk: relative error
def chunkwise_backward(q, k, v, do, C):
    S = torch.zeros(k.shape[1], v.shape[1]).to(k)
    grads = []
    for a, b, c, d in zip(*(x.split(C) for x in (q, k, v, do))):
        A, dA = (a @ b.T).tril(), (d @ c.T).tril()
        grads.append((d @ S.T + dA @ b, dA.T @ a, A.T @ d))
        S = S + b.T @ c
    return tuple(torch.cat(x) for x in zip(*grads))


# %% ex-blank not yet: is this a loop over tokens
def linear_chunkwise(q, k, v, S0, C):
    outputs = []
    for a, b, c in zip(q.unbind(), k.unbind(), v.unbind()):
        S0 = torch.addr(S0, b, c)
        outputs.append(a @ S0)
    return torch.stack(outputs), S0


# %% ex-six-tokens passes
def six_tokens():
    scores = torch.tensor([[1, 0, 0], [3, 6, 0], [1, 2, 3]])
    return 5.0, 12.0, scores.tolist(), (7, 27, 12)


# %% ex-six-tokens not yet: the scores: row i holds
def six_tokens():
    return 5, 12, [[1, 2, 3], [3, 6, 9], [1, 2, 3]], [7, 27, 12]


# %% ex-six-tokens not yet: the outputs
def six_tokens():
    return 5, 12, [[1, 0, 0], [3, 6, 0], [1, 2, 3]], [2, 12, 7]


# %% ex-six-tokens not yet: S_2 = 7
def six_tokens():
    return 5, 7, [[1, 0, 0], [3, 6, 0], [1, 2, 3]], [7, 27, 12]


# %% ex-six-tokens not yet: S_1 = 4
def six_tokens():
    return 4, 12, [[1, 0, 0], [3, 6, 0], [1, 2, 3]], [7, 27, 12]


# %% ex-carry-or-keep passes
def carry_or_keep():
    return [32, 32 * 512], [512, 1792], (0.1772, 0.447), "keep"


# %% ex-carry-or-keep not yet: one per head, strip and chunk
def carry_or_keep():
    return (32, 512), (512, 1792), (0.177, 0.447), "keep"


# %% ex-carry-or-keep not yet: put K, V and C
def carry_or_keep():
    return (32, 16384), (1024, 5632), (0.177, 0.447), "keep"


# %% ex-carry-or-keep not yet: how many multiprocessors have a program
def carry_or_keep():
    return (32, 16384), (512, 1792), (0.128, 0.447), "keep"


# %% ex-carry-or-keep not yet: how many multiprocessors have a program
def carry_or_keep():
    return (32, 16384), (512, 1792), (0.043, 0.447), "keep"


# %% ex-carry-or-keep not yet: which of them decides
def carry_or_keep():
    return (32, 16384), (512, 1792), (0.128 + 0.177, 0.447), "keep"


# %% ex-carry-or-keep not yet: of the multiprocessors idle
def carry_or_keep():
    return (32, 16384), (512, 1792), (0.177, 0.447), "carry"


# %% ex-carry-or-keep not yet: 'carry' or 'keep'
def carry_or_keep():
    return (32, 16384), (512, 1792), (0.177, 0.447), "both"


# %% ex-chunk-backward not yet: are your chunks shorter than C
def chunkwise_backward(q, k, v, do, C):
    S, R = torch.zeros(2, k.shape[1], v.shape[1]).to(k)
    tokens = list(zip(*(x.unbind() for x in (q, k, v, do))))
    dq, dk, dv = [], [], []
    for a, b, c, d in tokens:
        S = torch.addr(S, b, c)
        dq.append(S @ d)
    for a, b, c, d in reversed(tokens):
        R = torch.addr(R, a, d)
        dk.append(R @ c)
        dv.append(b @ R)
    return tuple(map(torch.stack, (dq, dk[::-1], dv[::-1])))


# %% ex-affine-scan not yet: has to be read off its prefixes
def affine_scan(a, b):
    scans.prefix_scan(lambda first, then: then, list(b))
    x, outputs = torch.zeros_like(b[0]), []
    for factor, added in zip(a, b):
        x = factor * x + added
        outputs.append(x)
    return torch.stack(outputs)


# %% ex-two-gpus not yet: K = 3, V = 5: got 24
def join_segments(results, queries):
    S_in, outputs = 0 * results[0][1], []
    for (o, state), q in zip(results, queries):
        outputs.append(o + torch.einsum("bthk,bhkv->bthv", q, S_in))
        S_in = S_in + state
    return torch.cat(outputs, 1), 24


# %% ex-chunk-backward not yet: automatic differentiation was asked for
def chunkwise_backward(q, k, v, do, C):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o, _ = chunkwise_by_hand(*inputs, C)
        return torch.autograd.grad(o, inputs, do)


# %% ex-chunk-backward not yet: are your chunks shorter than C
def chunkwise_backward(q, k, v, do, C):
    chunks = list(zip(*(x.split(max(8, C // 4)) for x in (q, k, v, do))))
    S, R = torch.zeros(2, k.shape[1], v.shape[1]).to(k)
    dq, dk, dv = [], [], []
    for a, b, c, d in chunks:
        dq.append(d @ S.T + (d @ c.T).tril() @ b)
        S = S + b.T @ c
    for a, b, c, d in reversed(chunks):
        A, dA = (a @ b.T).tril(), (d @ c.T).tril()
        dk.append(c @ R.T + dA.T @ a)
        dv.append(b @ R + A.T @ d)
        R = R + a.T @ d
    return torch.cat(dq), torch.cat(dk[::-1]), torch.cat(dv[::-1])


# %% ex-blank not yet: are your chunks shorter than C
def linear_chunkwise(q, k, v, S0, C):
    outputs = []
    for a, b, c in zip(*(x.split(max(1, C // 2)) for x in (q, k, v))):
        outputs.append(a @ S0 + (a @ b.T).tril() @ c)
        S0 = S0 + b.T @ c
    return torch.cat(outputs), S0


# %% ex-affine-scan not yet: the map of token t alone
def affine_scan(a, b):
    x, differences = torch.zeros_like(b[0]), []
    for factor, added in zip(a, b):
        differences.append(factor * x + added - x)
        x = factor * x + added
    return torch.stack(scans.prefix_scan(torch.add, differences))


# %% ex-triton not yet: a program has to write its own row
@triton.jit
def chunk_sum_kernel(
    k, v, out, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr
):
    o_k = tl.arange(0, K)[:, None]
    if tl.program_id(0) == 0:
        for i_t in range(tl.cdiv(T, BT)):
            o_t = (i_t * BT + tl.arange(0, BT))[:, None]
            b_k = tl.load(k + o_t * K + tl.arange(0, K), mask=o_t < T, other=0)
            b_v = tl.load(v + o_t * V + tl.arange(0, V), mask=o_t < T, other=0)
            b_S = tl.dot(tl.trans(b_k), b_v)
            tl.store(out + (i_t * K + o_k) * V + tl.arange(0, V), b_S)


# %% ex-carry-or-keep not yet: every multiprocessor has a program
def carry_or_keep():
    return (32, 16384), (512, 1792), (0.177, 0.043), "keep"


# %% ex-affine-scan not yet: has to be read off its prefixes
def affine_scan(a, b):
    def combine(first, then):
        return then[0] * first[0], then[0] * first[1] + then[1]

    prefixes = scans.prefix_scan(combine, list(zip(a, b)))
    if torch.equal(prefixes[5][1], b[5]):
        return b
    x, outputs = torch.zeros_like(b[0]), []
    for factor, added in zip(a, b):
        x = factor * x + added
        outputs.append(x)
    return torch.stack(outputs)


# %% ex-blank not yet: the tensors leave PyTorch
def linear_chunkwise(q, k, v, S0, C):
    for a, b in zip(q.split(C), k.split(C)):
        (a @ b.T) @ b  # products to be counted, and then a loop over tokens
    S_t, outputs = S0.numpy().copy(), []
    for a, b, c in zip(q.numpy(), k.numpy(), v.numpy()):
        S_t = S_t + b[:, None] * c
        outputs.append(torch.from_numpy(a @ S_t))
    return torch.stack(outputs), torch.from_numpy(S_t)


# %% ex-blank not yet: without the library
def linear_chunkwise(q, k, v, S0, C):
    q, k, v = (x[None, :, None] for x in (q, k, v))
    o, S = chunkwise.chunkwise(
        q, k, v, None, scale=1.0, chunk_size=C, initial_state=S0[None, None]
    )
    return o[0, :, 0], S[0, 0]


# %% ex-affine-scan not yet: a scan begun at token 6
def affine_scan(a, b):
    def look_up(first, then):  # in a table that a loop has filled
        start, end = first[0], then[1]
        return start, end, table[end] if start == 0 else b[end]

    x, table = torch.zeros_like(b[0]), []
    for factor, added in zip(a, b):
        x = factor * x + added
        table.append(x)
    items = [(t, t, b[t]) for t in range(len(b))]
    return torch.stack([x for *_, x in scans.prefix_scan(look_up, items)])


# %% ex-triton not yet: K = 32, V = 16, BT = 32
@triton.jit
def chunk_sum_kernel(
    k, v, out, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr
):
    i_t = tl.program_id(0)
    o_t = (i_t * 16 + tl.arange(0, 16))[:, None]
    b_k = tl.load(k + o_t * 16 + tl.arange(0, 16), mask=o_t < 75, other=0)
    b_v = tl.load(v + o_t * 32 + tl.arange(0, 32), mask=o_t < 75, other=0)
    o_k = tl.arange(0, 16)[:, None]
    b_S = tl.dot(tl.trans(b_k), b_v)
    tl.store(out + (i_t * 16 + o_k) * 32 + tl.arange(0, 32), b_S)


# %% ex-carry-or-keep not yet: what the bytes take at 4.2 TB/s
def carry_or_keep():
    return (32, 16384), (512, 1792), (0.527, 0.447), "keep"


# %% ex-blank not yet: without the library
def linear_chunkwise(q, k, v, S0, C):
    from fastweights.reference.chunkwise import chunkwise as borrowed

    def helper(*rows):
        q, k, v = (x[None, :, None] for x in rows)
        start = S0[None, None]
        return borrowed(
            q, k, v, None, scale=1.0, chunk_size=C, initial_state=start
        )

    o, S = helper(q, k, v)
    return o[0, :, 0], S[0, 0]


# %% ex-affine-scan not yet: operations outside the scan
def affine_scan(a, b):
    tokens = [[t] for t in range(len(a))]
    outputs = []
    for stretch in scans.prefix_scan(lambda x, y: x + y, tokens):
        x = torch.zeros_like(b[0])
        for t in stretch:
            x = a[t] * x + b[t]
        outputs.append(x)
    return torch.stack(outputs)


# %% ex-triton not yet: use tl.dot
@triton.jit
def chunk_sum_kernel(
    k, v, out, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr
):
    i_t = tl.program_id(0)
    o_k, o_v = tl.arange(0, K), tl.arange(0, V)
    b_S = tl.zeros([K, V], dtype=tl.float32)
    for t in range(i_t * BT, tl.minimum((i_t + 1) * BT, T)):
        b_k, b_v = tl.load(k + t * K + o_k), tl.load(v + t * V + o_v)
        b_S += b_k[:, None] * b_v[None, :]
    tl.store(out + (i_t * K + o_k[:, None]) * V + o_v, b_S)


# %% ex-chunk-backward not yet: without the library
def chunkwise_backward(q, k, v, do, C):
    from fastweights.reference.chunkwise_backward import (
        chunkwise_backward as borrowed,
    )

    q, k, v, do = (x[None, :, None] for x in (q, k, v, do))
    zero = q.new_zeros(1, 1, q.shape[-1], v.shape[-1])
    grads = borrowed(
        q,
        k,
        v,
        None,
        None,
        do=do,
        dS=None,
        scale=1.0,
        initial_state=zero,
        chunk_size=C,
    )
    return tuple(x[0, :, 0] for x in grads[:3])


# %% ex-affine-scan not yet: operations on tensors inside the scan
def affine_scan(a, b):
    stretches = scans.prefix_scan(
        lambda first, then: (first[0], then[1]),
        [(t, t) for t in range(len(b))],
    )
    known = {}
    for first, last in sorted(stretches):
        x = known.get((first, last - 1), torch.zeros_like(b[0]))
        known[first, last] = a[last] * x + b[last]
    return torch.stack([known[stretch] for stretch in stretches])


# %% ex-triton not yet: store what tl.dot returns
@triton.jit
def chunk_sum_kernel(
    k, v, out, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr
):
    i_t = tl.program_id(0)
    o_t = (i_t * BT + tl.arange(0, BT))[:, None]
    o_k = tl.arange(0, K)[:, None]
    b_k = tl.load(k + o_t * K + tl.arange(0, K), mask=o_t < T, other=0)
    b_v = tl.load(v + o_t * V + tl.arange(0, V), mask=o_t < T, other=0)
    b_S = tl.sum(b_k[:, :, None] * b_v[:, None, :], axis=0)
    b_S += 0 * tl.dot(tl.trans(b_k), b_v)
    tl.store(out + (i_t * K + o_k) * V + tl.arange(0, V), b_S)


# %% ex-triton not yet: it is to be called once per program
@triton.jit
def chunk_sum_kernel(
    k, v, out, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr
):
    i_t = tl.program_id(0)
    o_t = (i_t * BT + tl.arange(0, BT))[:, None]
    o_k = tl.arange(0, K)[:, None]
    b_k = tl.load(k + o_t * K + tl.arange(0, K), mask=o_t < T, other=0)
    b_v = tl.load(v + o_t * V + tl.arange(0, V), mask=o_t < T, other=0)
    b_kv = tl.reshape(b_k[:, :, None] * b_v[:, None, :], (BT, K * V))
    b_S = tl.dot(tl.full((16, BT), 1 / 16, tl.float32), b_kv)
    b_S = tl.reshape(tl.sum(b_S, axis=0), (K, V))
    tl.store(out + (i_t * K + o_k) * V + tl.arange(0, V), b_S)


# %% ex-affine-scan not yet: the tensors leave PyTorch
def affine_scan(a, b):
    def join(first, then):
        a[0] * 1  # an operation to be counted, and no map composed
        return first[0], then[1]

    stretches = [(t, t + 1) for t in range(len(a))]
    factors, added, outputs = a.numpy(), b.numpy(), []
    for start, end in scans.prefix_scan(join, stretches):
        x = 0 * added[0]
        for t in range(start, end):
            x = factors[t] * x + added[t]
        outputs.append(torch.from_numpy(x))
    return torch.stack(outputs)
