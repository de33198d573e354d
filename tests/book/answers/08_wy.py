"""Answers to chapter 8's exercises, and what their checks are to say."""


# %% ex-wy passes
def wy_factor(k, beta):
    """By the library's inverse of the transposed system."""
    M = (k @ k.T).tril(-1) * beta[:, None]
    return chunkwise.unit_lower_inverse(M) @ (beta[:, None] * k)


# %% ex-wy not yet: loop over tokens
def wy_factor(k, beta):
    w = []
    for t in range(len(k)):
        earlier = sum((k[t] @ k[i] * w[i] for i in range(t)), 0 * k[t])
        w.append(beta[t] * (k[t] - earlier))
    return torch.stack(w)


# %% ex-wy not yet: lines of Python for 256 tokens
def wy_factor(k, beta):
    keys, b = k.numpy(), beta.numpy()  # where PyTorch does not look
    w = 0 * keys
    for t in range(len(w)):
        w[t] = b[t] * (keys[t] - (keys[:t] @ keys[t]) @ w[:t])
    return torch.from_numpy(w)


# %% ex-wy not yet: the rows w_i
def wy_factor(k, beta):
    """With powers of M, by doubling."""
    M, eye = beta[:, None] * (k @ k.T).tril(-1), torch.eye(len(k), **double)
    P, power = eye - M, M @ M
    for _ in range(5):
        P, power = P @ (eye + power), power @ power
    return P @ (beta[:, None] * k)


# %% ex-wy not yet: the rows w_i
def wy_factor(k, beta):
    M = (k @ k.T).tril(-1) * beta  # the rates on the wrong side
    return torch.linalg.solve_triangular(
        torch.eye(len(k), dtype=k.dtype) + M,
        beta[:, None] * k,
        upper=False,
        unitriangular=True,
    )


# %% ex-inverse passes
def block_inverse(M):
    """Level by level, all blocks of a level at once."""
    C = len(M)
    P, size = torch.eye(C, dtype=M.dtype), 1
    block = torch.arange(C)
    while size < C:
        row, column = (block // size)[:, None], (block // size)[None]
        off = M * ((row % 2 == 1) & (column == row - 1))
        P = P - P @ off @ P
        size *= 2
    return P


# %% ex-inverse passes
def block_inverse(M):
    """The two halves as a batch, in place."""
    P = M.new_zeros(M.shape)
    P.diagonal().fill_(1)
    size = 1
    while size < len(M):
        for i in range(0, len(M), 2 * size):
            a, b = slice(i, i + size), slice(i + size, i + 2 * size)
            P[b, a] = -(P[b, b] @ M[b, a] @ P[a, a])
        size *= 2
    return P


# %% ex-inverse not yet: row by row; halve the matrix
def block_inverse(M):
    P = torch.eye(len(M), dtype=M.dtype)
    for i in range(1, len(M)):
        P[i, :i] = -M[i, :i] @ P[:i, :i]
    return P


# %% ex-inverse not yet: right without them
def block_inverse(M):
    M @ M  # a product for the record only
    rows = M.double()
    P = torch.eye(len(M), **double)
    for i in range(1, len(M)):
        P[i, :i] = -rows[i, :i] @ P[:i, :i]
    return P.to(M.dtype)


# %% ex-inverse not yet: they join nothing
def block_inverse(M):
    rows = M.double()
    P = torch.eye(len(M), **double)
    for i in range(1, len(M)):
        P[i, :i] = -rows[i, :i] @ P[:i, :i]
    return P.to(M.dtype) @ torch.eye(len(M), dtype=M.dtype)  # joins nothing


# %% ex-inverse not yet: they join nothing
def block_inverse(M):
    """Elsewhere, and then four products with multiples of the identity."""
    M64, eye = M.double(), torch.eye(len(M), dtype=M.dtype)
    P = torch.eye(len(M), **double)
    for i in range(1, len(M)):
        P[i, :i] = -(M64[i, :i, None] * P[:i, :i]).sum(0)
    P = P.to(M.dtype)
    for factor in (2, 0.5, 2, 0.5):
        P = P @ (factor * eye)
    return P


# %% ex-inverse not yet: ones on the diagonal are gone
def block_inverse(M):
    """Elsewhere, and then four products that undo each other."""
    M64, eye = M.double(), torch.eye(len(M), dtype=M.dtype)
    P = torch.eye(len(M), **double)
    for i in range(1, len(M)):
        P[i, :i] = -(M64[i, :i, None] * P[:i, :i]).sum(0)
    P, last = P.to(M.dtype), eye.flip(0)
    for _ in range(4):
        P = P @ last
    return P


# %% ex-inverse not yet: products of large matrices, one after the other
def block_inverse(M):
    """The fixed point of P = I - M P, which 64 dense products reach."""
    P = eye = torch.eye(len(M), dtype=M.dtype)
    for _ in range(len(M)):
        P = eye - M @ P
    return P


# %% ex-inverse not yet: linalg_\w+ does it for you
def block_inverse(M):
    return torch.linalg.inv(torch.eye(len(M), dtype=M.dtype) + M)


# %% ex-inverse not yet: triangular does it for you
def block_inverse(M):
    eye = torch.eye(len(M), dtype=M.dtype)
    return torch.linalg.solve_triangular(eye + M, eye, upper=False)


# %% ex-inverse not yet: powers of M
def block_inverse(M):
    return by_doubling(M) if len(M) > 1 else torch.ones_like(M)


# %% ex-inverse not yet: the library did it
def block_inverse(M):
    return chunkwise.inverse_by_blocks(M)


# %% ex-inverse not yet: the library did it
def block_inverse(M):
    """NumPy inverts the blocks of 16, and products join them."""
    import numpy

    if len(M) <= 16:
        eye = torch.eye(len(M), **double)
        P = numpy.linalg.inv((eye + M.double()).numpy())
        return torch.from_numpy(P).to(M.dtype)
    one, two = slice(0, len(M) // 2), slice(len(M) // 2, len(M))
    P = torch.zeros_like(M)
    P[one, one], P[two, two] = (block_inverse(M[n, n]) for n in (one, two))
    P[two, one] = -P[two, two] @ (M[two, one] @ P[one, one])
    return P


# %% ex-inverse not yet: keep the dtype of M
def block_inverse(M):
    """Powers of M after all, in fp64, in halves that a product joins."""
    C = len(M)
    if C <= 32:
        P, power = torch.eye(C, **double) - M, M.double() @ M.double()
        for _ in range(int(math.log2(C)) - 1):
            P, power = P + P @ power, power @ power
        return P.to(M.dtype)
    one, two = slice(0, C // 2), slice(C // 2, C)
    P = torch.zeros_like(M)
    P[one, one], P[two, two] = (block_inverse(M[n, n]) for n in (one, two))
    P[two, one] = -P[two, two] @ (M[two, one] @ P[one, one])
    return P


# %% ex-blank-delta passes
def deltanet_chunkwise(q, k, v, beta, S0, C):
    """With the inverse, three products in sequence, and einsum."""
    T = k.shape[1]
    N = -(-T // C)

    def cut(x):
        whole = x.new_zeros(x.shape[0], N * C, x.shape[-1])
        whole[:, :T] = x
        return whole.view(x.shape[0], N, C, x.shape[-1]).transpose(0, 1)

    q, k, v, rate = (cut(x) for x in (q, k, v, beta[..., None]))
    P = chunkwise.unit_lower_inverse(rate * (k @ k.mT).tril(-1))
    A, o, S = (q @ k.mT).tril(), torch.zeros_like(v), S0.clone()
    for n in range(N):
        lack = rate[n] * (v[n] - torch.einsum("htk,hkv->htv", k[n], S))
        new = P[n] @ lack
        o[n] = q[n] @ S + A[n] @ new
        S += k[n].mT @ new
    return o.transpose(0, 1).flatten(1, 2)[:, :T], S


# %% ex-blank-delta not yet: products per chunk inside the loop
def deltanet_chunkwise(q, k, v, beta, S0, C):
    outputs = []
    for start in range(0, q.shape[1], C):
        n = slice(start, start + C)
        rate = beta[:, n, None]
        M = rate * (k[:, n] @ k[:, n].mT).tril(-1)
        new = torch.linalg.solve_triangular(
            torch.eye(M.shape[-1], dtype=M.dtype) + M,
            rate * (v[:, n] - k[:, n] @ S0),
            upper=False,
            unitriangular=True,
        )
        A = (q[:, n] @ k[:, n].mT).tril()
        outputs.append(q[:, n] @ S0 + A @ new)
        S0 = S0 + k[:, n].mT @ new
    return torch.cat(outputs, dim=1), S0


# %% ex-blank-delta not yet: products with transposed keys for 19 chunks
def deltanet_chunkwise(q, k, v, beta, S0, C):
    """Five products per chunk, with its scores among them."""
    o = []
    for start in range(0, q.shape[1], C):
        n = slice(start, start + C)
        keys, rate = k[:, n], beta[:, n, None]
        both = torch.cat([q[:, n], keys], dim=1) @ keys.mT
        A, overlap = both.chunk(2, dim=1)
        new = torch.linalg.solve_triangular(
            (rate * overlap).tril(-1),
            rate * (v[:, n] - keys @ S0),
            upper=False,
            unitriangular=True,
        )
        o.append(q[:, n] @ S0 + A.tril() @ new)
        S0 = S0 + keys.mT @ new
    return torch.cat(o, dim=1), S0


# %% ex-blank-delta not yet: products with transposed keys for 19 chunks
def deltanet_chunkwise(q, k, v, beta, S0, C):
    """Five products per chunk, with its scores among them, keys first."""
    o = []
    for start in range(0, q.shape[1], C):
        n = slice(start, start + C)
        keys, rate = k[:, n], beta[:, n, None]
        both = torch.cat([q[:, n], keys], dim=1)
        found, asked = (both @ S0).chunk(2, dim=1)[::-1]
        A, overlap = (keys @ both.mT).mT.chunk(2, dim=1)
        new = torch.linalg.solve_triangular(
            (rate * overlap).tril(-1),
            rate * (v[:, n] - found),
            upper=False,
            unitriangular=True,
        )
        o.append(asked + A.tril() @ new)
        S0 = S0 + keys.mT @ new
    return torch.cat(o, dim=1), S0


# %% ex-blank-delta not yet: C is to be the chunk size
def deltanet_chunkwise(q, k, v, beta, S0, C):
    rate = beta[..., None]
    M = rate * (k @ k.mT).tril(-1)
    new = torch.linalg.solve_triangular(
        torch.eye(M.shape[-1], dtype=M.dtype) + M,
        rate * (v - k @ S0),
        upper=False,
        unitriangular=True,
    )
    return q @ S0 + (q @ k.mT).tril() @ new, S0 + k.mT @ new


# %% ex-blank-delta not yet: loop over tokens
def deltanet_chunkwise(q, k, v, beta, S0, C):
    o = []
    for t in range(q.shape[1]):
        n = slice(t, t + 1)
        missing = v[:, n] - k[:, n] @ S0
        S0 = S0 + k[:, n].mT @ (beta[:, n, None] * missing)
        o.append(q[:, n] @ S0)
    return torch.cat(o, dim=1), S0


# %% ex-blank-delta not yet: loop over tokens
def deltanet_chunkwise(q, k, v, beta, S0, C):
    """Without products, but for one per chunk that is not used."""
    for _ in range(-(-k.shape[1] // C)):
        q[:, :1] @ S0
    states, S = [], S0
    rates = (beta[..., None] * k)[..., None].unbind(1)
    for k_t, v_t, rate in zip(
        k[..., None].unbind(1), v[:, :, None].unbind(1), rates, strict=True
    ):
        missing = v_t - (k_t * S).sum(1, keepdim=True)
        S = torch.addcmul(S, rate, missing)
        states.append(S)
    return (q[..., None] * torch.stack(states, 1)).sum(2), S


# %% ex-blank-delta not yet: the scores do not come from matrix products
def deltanet_chunkwise(q, k, v, beta, S0, C):
    """A loop over tokens outside of PyTorch, and products for the record."""
    for _ in range(-(-k.shape[1] // C)):
        q[:, :1] @ S0
    q_, k_, v_, b_, S = (x.numpy() for x in (q, k, v, beta, S0.clone()))
    o = 0 * v_
    for t in range(k.shape[1]):
        missing = v_[:, t] - (k_[:, t, :, None] * S).sum(1)
        S = S + (b_[:, t, None] * k_[:, t])[..., None] * missing[:, None]
        o[:, t] = (q_[:, t, :, None] * S).sum(1)
    return torch.from_numpy(o), torch.from_numpy(S)


# %% ex-blank-delta not yet: the scores do not come from matrix products
def deltanet_chunkwise(q, k, v, beta, S0, C):
    """Scores inside the loop, as sums that no product counts."""
    q, k, v, rate = (
        F.pad(x, (0, 0, 0, -k.shape[1] % C)).unflatten(1, (-1, C))
        for x in (q, k, v, beta[..., None])
    )
    o, T = [], beta.shape[1]
    for n in range(k.shape[1]):
        overlap, A = (
            (x[:, n, :, None] * k[:, n, None]).sum(-1) for x in (k, q)
        )
        new = torch.linalg.solve_triangular(
            (rate[:, n] * overlap).tril(-1),
            rate[:, n] * (v[:, n] - k[:, n] @ S0),
            upper=False,
            unitriangular=True,
        )
        o.append(q[:, n] @ S0 + A.tril() @ new)
        S0 = S0 + k[:, n].mT @ new
    return torch.cat(o, dim=1)[:, :T], S0


# %% ex-blank-delta not yet: relative error
def deltanet_chunkwise(q, k, v, beta, S0, C):
    o, S_T = [], []
    for one in zip(q, k, v, beta, strict=True):  # forgets S0
        o_h, S_h = delta_by_hand(*one, C)
        o.append(o_h)
        S_T.append(S_h)
    return torch.stack(o), torch.stack(S_T)


# %% ex-blank-delta not yet: library did it
def deltanet_chunkwise(q, k, v, beta, S0, C):
    one = [x.transpose(0, 1)[None] for x in (q, k, v, beta)]
    o, S = chunkwise.chunkwise(
        *one[:3], None, one[3], scale=1.0, chunk_size=C, initial_state=S0[None]
    )
    return o[0].transpose(0, 1), S[0]


# %% ex-blank-delta not yet: library did it
def deltanet_chunkwise(q, k, v, beta, S0, C):
    o, S = fw.deltanet(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        beta.T[None],
        scale=1.0,
        chunk_size=min(max(C, 16), 64),
        initial_state=S0[None],
    )
    return o[0].transpose(0, 1), S[0]


# %% ex-blank-delta not yet: as many products for C = 4 as for C = 8
def deltanet_chunkwise(q, k, v, beta, S0, C):
    C, T, o = 64, k.shape[1], []  # whatever was asked for
    q, k, v, rate = (
        F.pad(x, (0, 0, 0, -T % C)).unflatten(1, (-1, C))
        for x in (q, k, v, beta[..., None])
    )
    P = chunkwise.unit_lower_inverse(rate * (k @ k.mT).tril(-1))
    W, U, A = P @ (rate * k), P @ (rate * v), (q @ k.mT).tril()
    for n in range(k.shape[1]):
        new = U[:, n] - W[:, n] @ S0
        o.append(q[:, n] @ S0 + A[:, n] @ new)
        S0 = S0 + k[:, n].mT @ new
    return torch.cat(o, dim=1)[:, :T], S0


# %% ex-two-gpus-delta passes
def segment_map(k, v, beta):
    """Phi as the difference of two runs on the same values."""
    H, D = k.shape[2:]
    V = torch.cat([v, torch.zeros_like(k)], dim=-1)
    start = torch.cat(
        [
            k.new_zeros(H, D, v.shape[-1]),
            torch.eye(D, dtype=k.dtype).expand(H, D, D),
        ],
        dim=-1,
    )
    _, S = fw.deltanet(k, k, V, beta, initial_state=start[None])
    _, B = fw.deltanet(k, k, v, beta)
    return (
        S[0, ..., v.shape[-1] :],
        B[0],
        k.shape[-1] * (k.shape[-1] + v.shape[-1]),
    )


# %% ex-two-gpus-delta not yet: relative error
def segment_map(k, v, beta):
    eye = torch.eye(k.shape[-1], dtype=k.dtype).expand(1, k.shape[2], -1, -1)
    _, B = fw.deltanet(k, k, v, beta)
    _, Phi = fw.deltanet(k, k, k, beta, initial_state=eye)  # values not zero
    return Phi[0], B[0], 60


# %% ex-two-gpus-delta passes
def segment_map(k, v, beta):
    """Both in one call, with a state of V + K columns."""
    H, D = k.shape[2:]
    V = torch.cat([v, torch.zeros_like(k)], dim=-1)
    start = k.new_zeros(1, H, D, V.shape[-1])
    start[..., v.shape[-1] :] = torch.eye(D)
    _, S = fw.deltanet(k, k, V, beta, initial_state=start)
    return (
        S[0, ..., v.shape[-1] :],
        S[0, ..., : v.shape[-1]],
        k.shape[-1] * (k.shape[-1] + v.shape[-1]),
    )


# %% ex-two-gpus-delta not yet: 24 numbers per head to send
def segment_map(k, v, beta):  # a state is enough only without erasing
    eye = torch.eye(k.shape[-1], dtype=k.dtype).expand(1, k.shape[2], -1, -1)
    _, B = fw.deltanet(k, k, v, beta)
    _, Phi = fw.deltanet(k, k, 0 * k, beta, initial_state=eye)
    return Phi[0], B[0], B[0, 0].numel()


# %% ex-two-gpus-delta not yet: 30 calls of the library
def segment_map(k, v, beta):
    """Token by token."""
    H, D = k.shape[2:]
    S = torch.cat(
        [k.new_zeros(H, D, v.shape[-1]), torch.eye(D).repeat(H, 1, 1)], -1
    )
    V, S = torch.cat([v, torch.zeros_like(k)], dim=-1), S[None].to(k)
    for t in range(k.shape[1]):
        n = slice(t, t + 1)
        _, S = fw.deltanet(
            k[:, n], k[:, n], V[:, n], beta[:, n], initial_state=S
        )
    return S[0, ..., v.shape[-1] :], S[0, ..., : v.shape[-1]], 60


# %% ex-two-gpus-delta not yet: do not come from the operator
def segment_map(k, v, beta):
    """By a product of matrices, token by token."""
    Phi = torch.eye(k.shape[-1], dtype=k.dtype).expand(k.shape[2], -1, -1)
    for t in range(k.shape[1]):
        row = k[0, t, :, None]
        Phi = Phi - beta[0, t, :, None, None] * row.mT @ (row @ Phi)
    _, B = fw.deltanet(k, k, v, beta)
    return Phi, B[0], 60


# %% ex-two-gpus-delta not yet: do not come from the operator
def segment_map(k, v, beta):
    Phi = torch.eye(k.shape[-1], dtype=k.dtype).expand(k.shape[2], -1, -1)
    B = k.new_zeros(k.shape[2], k.shape[-1], v.shape[-1])
    for t in range(k.shape[1]):
        row, rate = k[0, t, :, None], beta[0, t, :, None, None]
        Phi = Phi - rate * row.mT @ (row @ Phi)
        B = B + rate * row.mT @ (v[0, t, :, None] - row @ B)
    for _ in range(2):  # for the record only
        fw.deltanet(k, k, v, beta)
    return Phi, B, 60


# %% ex-two-gpus-delta not yet: do not come from the operator
def segment_map(k, v, beta):
    Phi = torch.eye(k.shape[-1], dtype=k.dtype).expand(k.shape[2], -1, -1)
    B = k.new_zeros(k.shape[2], k.shape[-1], v.shape[-1])
    for t in range(k.shape[1]):
        row, rate = k[0, t, :, None], beta[0, t, :, None, None]
        Phi = Phi - rate * row.mT @ (row @ Phi)
        B = B + rate * row.mT @ (v[0, t, :, None] - row @ B)
    called = [fw.deltanet(k, k, v, beta)[1].any() for _ in range(2)]
    return called[0] * Phi, called[1] * B, 60  # all that is taken from it


# %% ex-two-gpus-delta not yet: do not come from the operator
def segment_map(k, v, beta):
    """By itself, times a number from the operator, which is one."""
    H, D = k.shape[2:]
    ones = torch.ones(1, H, D, v.shape[-1], **double)
    _, S = fw.deltanet(k, k, v, 0 * beta, initial_state=ones)
    Phi, B = torch.eye(D, **double).expand(H, D, D), 0 * ones[0]
    for t in range(k.shape[1]):
        row, rate = k[0, t, :, None], beta[0, t, :, None, None]
        Phi = Phi - rate * row.mT @ (row @ Phi)
        B = B + rate * row.mT @ (v[0, t, :, None] - row @ B)
    return S.mean() * Phi, S.mean() * B, 60


# %% ex-dk passes
def key_gradients(Q, K, beta, S, new, Y, dO, dS):
    """By sums over pairs of tokens, in indices."""
    C = len(K)
    later = torch.ones(C, C, **double).tril(-1)
    dA = torch.einsum("iv,jv->ij", dO, new) * (later + torch.eye(C, **double))
    N = -torch.einsum("ix,iv,jv->ij", beta, Y, new) * later
    overlaps = torch.einsum("ij,jk->ik", N, K)
    overlaps = overlaps + torch.einsum("ij,ik->jk", N, K)
    lacking = -torch.einsum("iv,kv->ik", beta * Y, S)
    return (
        torch.einsum("ij,ik->jk", dA, Q),
        torch.einsum("iv,kv->ik", new, dS),
        lacking,
        overlaps,
    )


# %% ex-dk not yet: the overlaps: relative error
def key_gradients(Q, K, beta, S, new, Y, dO, dS):
    dAqk, N = (dO @ new.T).tril(), -beta * (Y @ new.T).tril(-1)
    return dAqk.T @ Q, new @ dS.T, -beta * Y @ S.T, N @ K  # one side only


# %% ex-dk not yet: the scores: relative error
def key_gradients(Q, K, beta, S, new, Y, dO, dS):
    """The sum is right, its parts are not."""
    dAqk, N = (dO @ new.T).tril(), -beta * (Y @ new.T).tril(-1)
    whole = dAqk.T @ Q + new @ dS.T - beta * Y @ S.T + (N + N.T) @ K
    return whole / 4, whole / 4, whole / 4, whole / 4


# %% ex-dk not yet: automatic differentiation
def key_gradients(Q, K, beta, S, new, Y, dO, dS):
    with torch.enable_grad():
        k = K.clone().requires_grad_()
        loss = ((Q @ k.T).tril() @ new * dO).sum()
        (one,) = torch.autograd.grad(loss, k)
    return one, new @ dS.T, -beta * Y @ S.T, 0 * K


# %% ex-dk not yet: differences, not formulas
def key_gradients(Q, K, beta, S, new, Y, dO, dS):
    """All differences at once: exact for polynomials of degree two."""
    step = torch.eye(K.numel(), **double).view(-1, *K.shape)
    places = (
        lambda k: ((Q @ k.mT).tril() @ new * dO).sum((1, 2)),
        lambda k: (k.mT @ new * dS).sum((1, 2)),
        lambda k: -(Y * beta * (k @ S)).sum((1, 2)),
        lambda k: -(Y * beta * ((k @ k.mT).tril(-1) @ new)).sum((1, 2)),
    )
    return [((f(K + step) - f(K - step)) / 2).view(K.shape) for f in places]


# %% ex-full-backward passes
def deltanet_backward(q, k, v, beta, S0, do, dS, C):
    """The states in one loop with the inverse; lists filled from the end."""
    T, D, E = *k.shape, v.shape[1]
    N = -(-T // C)

    def cut(x):
        whole = x.new_zeros(N * C, x.shape[-1])
        whole[:T] = x
        return whole.view(N, C, -1)

    q, k, v, do, b = (cut(x) for x in (q, k, v, do, beta[:, None]))
    overlap, scores = (k @ k.mT).tril(-1), (q @ k.mT).tril()
    P = chunkwise.unit_lower_inverse(b * overlap)
    states, new = k.new_zeros(N, D, E), torch.zeros_like(v)
    for n in range(N):
        states[n] = S0
        new[n] = P[n] @ (b[n] * (v[n] - k[n] @ S0))
        S0 = S0 + k[n].T @ new[n]
    leaves, y = k.new_zeros(N, D, E), torch.zeros_like(v)
    for n in range(N - 1, -1, -1):
        leaves[n] = dS
        y[n] = P[n].T @ (scores[n].T @ do[n] + k[n] @ dS)
        dS = dS + q[n].T @ do[n] - k[n].T @ (b[n] * y[n])
    dA = torch.einsum("niv,njv->nij", do, new).tril()
    dM = -(b * (y @ new.mT)).tril(-1)
    dk = dA.mT @ q + new @ leaves.mT - (b * y) @ states.mT
    dk = dk + dM @ k + dM.mT @ k
    dbeta = (y * (v - k @ states - overlap @ new)).sum(-1, keepdim=True)
    dq = do @ states.mT + dA @ k
    dq, dk, dv, dbeta = (
        x.reshape(N * C, -1)[:T] for x in (dq, dk, b * y, dbeta)
    )
    return dq, dk, dv, dbeta[:, 0], dS


# %% ex-full-backward not yet: as many products for C = 4 as for C = 8
def deltanet_backward(q, k, v, beta, S0, do, dS, C):
    """The whole sequence as one chunk."""
    b, overlap, scores = beta[:, None], (k @ k.T).tril(-1), (q @ k.T).tril()
    P = chunkwise.unit_lower_inverse(b * overlap)
    new = P @ (b * (v - k @ S0))
    y = P.T @ (scores.T @ do + k @ dS)
    dA, dM = (do @ new.T).tril(), -(b * (y @ new.T)).tril(-1)
    dk = dA.T @ q + new @ dS.T - (b * y) @ S0.T + (dM + dM.T) @ k
    dbeta = (y * (v - k @ S0 - overlap @ new)).sum(-1)
    dS0 = dS + q.T @ do - k.T @ (b * y)
    return do @ S0.T + dA @ k, dk, b * y, dbeta, dS0


# %% ex-full-backward not yet: library did it
def deltanet_backward(q, k, v, beta, S0, do, dS, C):
    return chunkwise_backward.chunkwise_backward(q, k, v, beta, do)


# %% ex-full-backward not yet: automatic differentiation
def deltanet_backward(q, k, v, beta, S0, do, dS, C):
    one = (None, slice(None), None)
    with torch.enable_grad():
        x = [y.clone().requires_grad_() for y in (q, k, v, beta, S0)]
        o, S = fw.deltanet(
            *(y[one] for y in x[:3]),
            x[3][None, :, None],
            scale=1.0,
            initial_state=x[4][None, None],
            backend="loop",
        )
        loss = (o[0, :, 0] * do).sum() + (S[0, 0] * dS).sum()
        return torch.autograd.grad(loss, x)


# %% ex-full-backward not yet: products per chunk inside the loops
def deltanet_backward(q, k, v, beta, S0, do, dS, C):
    chunks, kept, grads = [], [], []
    for start in range(0, len(q), C):
        n = slice(start, start + C)
        overlap, rate = (k[n] @ k[n].T).tril(-1), beta[n, None]
        eye = torch.eye(len(overlap), dtype=k.dtype)
        P = torch.linalg.inv(eye + rate * overlap)
        new = P @ (rate * (v[n] - k[n] @ S0))
        chunks.append(n)
        kept.append((S0, overlap, P, new))
        S0 = S0 + k[n].T @ new
    for n, (S, overlap, P, new) in zip(chunks[::-1], kept[::-1], strict=True):
        scores, dA = (q[n] @ k[n].T).tril(), (do[n] @ new.T).tril()
        y = P.T @ (scores.T @ do[n] + k[n] @ dS)
        erased = beta[n, None] * y
        dAkk = -(erased @ new.T).tril(-1)
        dk = dA.T @ q[n] + new @ dS.T - erased @ S.T
        grads.append(
            (
                do[n] @ S.T + dA @ k[n],
                dk + (dAkk + dAkk.T) @ k[n],
                erased,
                (y * (v[n] - k[n] @ S - overlap @ new)).sum(-1),
            )
        )
        dS = dS + q[n].T @ do[n] - k[n].T @ erased
    parts = zip(*grads[::-1], strict=True)
    return *(torch.cat(x) for x in parts), dS


# %% ex-full-backward not yet: operations per chunk inside the loops
def deltanet_backward(q, k, v, beta, S0, do, dS, C):
    """Everything inside the loops, mostly as sums that no product counts."""

    def times(x, y):
        return (x[:, :, None] * y[None]).sum(1)

    kept, grads = [], []
    for start in range(0, len(q), C):
        n = slice(start, start + C)
        overlap, rate = times(k[n], k[n].T).tril(-1), beta[n, None]
        P = chunkwise.unit_lower_inverse(rate * overlap)
        new = P @ (rate * (v[n] - k[n] @ S0))
        kept.append((n, S0, overlap, P, new))
        S0 = S0 + k[n].T @ new
    for n, S, overlap, P, new in kept[::-1]:
        scores, dA = times(q[n], k[n].T).tril(), times(do[n], new.T).tril()
        y = P.T @ (times(scores.T, do[n]) + k[n] @ dS)
        erased = beta[n, None] * y
        dAkk = -times(erased, new.T).tril(-1)
        dk = times(dA.T, q[n]) + times(new, dS.T) - times(erased, S.T)
        dbeta = y * (v[n] - times(k[n], S) - times(overlap, new))
        grads.append(
            (
                times(do[n], S.T) + times(dA, k[n]),
                dk + times(dAkk + dAkk.T, k[n]),
                erased,
                dbeta.sum(-1),
            )
        )
        dS = dS + times(q[n].T, do[n]) - times(k[n].T, erased)
    parts = zip(*grads[::-1], strict=True)
    return *(torch.cat(x) for x in parts), dS


# %% ex-full-backward not yet: do not come from matrix products
def deltanet_backward(q, k, v, beta, S0, do, dS, C):
    """Everything inside the loops, and no product but with a state."""

    def times(x, y):
        return (x[:, :, None] * y).sum(1)

    def solve(system, right, upper):
        return torch.linalg.solve_triangular(
            system, right, upper=upper, unitriangular=True
        )

    chunks = list(
        zip(*(x.split(C) for x in (q, k, v, beta[:, None], do)), strict=True)
    )
    kept, grads = [], []
    for _, k_n, v_n, b_n, _ in chunks:
        overlap, lack = times(k_n, k_n.T).tril(-1), v_n - k_n @ S0
        new = solve(b_n * overlap, b_n * lack, upper=False)
        kept.append((S0, overlap, lack, new))
        S0 = S0 + k_n.T @ new
    for (q_n, k_n, _, b_n, do_n), (S, overlap, lack, new) in zip(
        chunks[::-1], kept[::-1], strict=True
    ):
        dnew = times(times(q_n, k_n.T).tril().T, do_n) + k_n @ dS
        y = solve((b_n * overlap).T, dnew, upper=True)
        erased = b_n * y
        dA, dM = times(do_n, new.T).tril(), -times(erased, new.T).tril(-1)
        dk = times(dA.T, q_n) + times(new, dS.T) - times(erased, S.T)
        dk = dk + times(dM + dM.T, k_n)
        dbeta = (y * (lack - times(overlap, new))).sum(-1)
        grads.append((do_n @ S.T + times(dA, k_n), dk, erased, dbeta))
        dS = dS + q_n.T @ do_n - k_n.T @ erased
    parts = zip(*grads[::-1], strict=True)
    return *(torch.cat(x) for x in parts), dS


# %% ex-binomials passes
def identical_keys(C):
    """By counting chains, and P by the recursion that P solves."""
    # Of a Toeplitz matrix the first column is enough.
    first = [0] + [1] * (C - 1)
    for _ in range(C // 2 - 1):
        first = [0, *itertools.accumulate(first)][:C]
    largest = max(first)
    P = torch.eye(C, **double)
    P[range(1, C), range(C - 1)] = -1
    return largest, P


# %% ex-binomials not yet: find it with pencil and paper
def identical_keys(C):
    M = torch.ones(C, C, **double).tril(-1)
    P = torch.linalg.inv(torch.eye(C, **double) + M)
    return math.comb(C - 2, C // 2 - 1), P


# %% ex-binomials not yet: the library did it
def identical_keys(C):
    """By NumPy's inverse, which no operation of PyTorch shows."""
    import numpy

    P = numpy.linalg.inv(numpy.tril(numpy.ones((C, C))))
    return math.comb(C - 2, C // 2 - 1), torch.from_numpy(P)


# %% ex-binomials not yet: the library did it
def identical_keys(C):
    P = chunkwise.inverse_by_blocks(torch.ones(C, C, **double).tril(-1))
    return math.comb(C - 2, C // 2 - 1), P


# %% ex-binomials not yet: is not the largest entry
def identical_keys(C):
    P = torch.eye(C) - torch.diag(torch.ones(C - 1), -1)
    return math.comb(C, C // 2), P


# %% ex-binomials not yet: relative error
def identical_keys(C):
    return math.comb(C - 2, C // 2 - 1), torch.ones(C, C).tril()


# %% ex-binomials not yet: this solves for P
def identical_keys(C):
    """P by forward substitution, row by row."""
    P = torch.eye(C, **double)
    for i in range(1, C):
        P[i] = P[i] - P[:i].sum(0)
    return math.comb(C - 2, C // 2 - 1), P
