"""In the selective scan: its arguments, its operator, its kernels."""

SELECTIVE, PREFIX, CHUNKS, TILES = (
    f"{file}.py"
    for file in (
        "fastweights/ops/selective",
        "fastweights/reference/prefix",
        "fastweights/reference/selective",
        "fastweights/kernels/selective",
    )
)
TESTS = {
    SELECTIVE: "ops/test_selective.py",
    PREFIX: "reference/test_prefix.py",
    CHUNKS: "ops/test_selective.py",
    TILES: "kernels/test_selective.py",
}
MUTANTS = {
    "selective-gate-after-rounding": (
        SELECTIVE,
        "keep, z is not None, backend",
        "keep, False, backend",
    ),
    "selective-bias-in-half-precision": (
        SELECTIVE,
        "dt = dt.to(full) + dt_bias.to(full)",
        "dt = dt + dt_bias.to(dt.dtype)",
    ),
    "selective-softplus-in-half-precision": (
        SELECTIVE,
        "F.softplus(dt.to(full))",
        "F.softplus(dt.to(x.dtype))",
    ),
    "selective-gate-is-a-sigmoid": (
        SELECTIVE,
        "F.silu(z.to(full))",
        "F.sigmoid(z.to(full))",
    ),
    "selective-states-are-always-kept": (
        SELECTIVE,
        "keep = needs_gradient(*inputs)",
        "keep = any(x is not None and x.requires_grad for x in inputs)",
    ),
    "selective-loop-without-the-skip": (
        SELECTIVE,
        "y = y + D.to(full) * x[:, :ends].to(full)",
        "y = y + D.to(full)",
    ),
    "selective-loop-goes-on-from-the-first": (
        SELECTIVE,
        "torch.cat(states[s])",
        "torch.cat(states[: len(x)])",
    ),
    "selective-groups-that-do-not-divide": (
        SELECTIVE,
        "or G < 1 or channels % G",
        "or G < 1",
    ),
    "selective-last-state-has-no-gradient": (
        SELECTIVE,
        "module.backward(dy, dstate, x, *inputs, states)",
        "module.backward(dy, None, x, *inputs, states)",
    ),
    "selective-one-tile-short": (
        SELECTIVE,
        "T // length + cu_seqlens.shape[0] - 1",
        "T // length + cu_seqlens.shape[0] - 2",
    ),
    "selective-fake-states-of-a-batch": (
        SELECTIVE,
        "x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1",
        "x.shape[0]",
    ),
    "selective-pairs-forget-the-first-decay": (
        PREFIX,
        "pairs = a[:, second] * a[:, before]",
        "pairs = a[:, second]",
    ),
    "selective-others-start-one-late": (
        PREFIX,
        "first = (L + 1) % 2 if reverse else 2",
        "first = (L + 1) % 2 if reverse else 4",
    ),
    "selective-starts-from-nothing": (
        CHUNKS,
        "    b[:, 0] = h\n",
        "    b[:, 0] = 0\n",
    ),
    "selective-last-gradient-is-lost": (
        CHUNKS,
        "dhs[:, -1] += dh",
        "dhs[:, -1] = dh",
    ),
    "selective-gradient-decays-early": (
        CHUNKS,
        "scan_by_pairs_(a[:, 2:], dhs",
        "scan_by_pairs_(a[:, 1:-1], dhs",
    ),
    "selective-gate-sees-the-undecayed": (
        CHUNKS,
        "dhs.mul_(a[:, 1:-1]).mul_",
        "dhs.mul_",
    ),
    "selective-rates-of-the-first-chunk": (
        CHUNKS,
        "dA += dA_t",
        "dA = dA_t",
    ),
    "selective-skip-of-the-first-chunk": (
        CHUNKS,
        "dD += (dy_t * x_t)",
        "dD = (dy_t * x_t)",
    ),
    "selective-sequences-share-a-place": (
        CHUNKS,
        "start // length + (n.start or 0)",
        "start // length",
    ),
    "selective-chunk-of-one-size": (
        CHUNKS,
        "return 64 if D * N <= 4096 else 16",
        "return 1024",
    ),
    "kernel-selective-tile-hands-on-its-first": (
        TILES,
        "b_h = row(b_hs, BT - 1)",
        "b_h = row(b_hs, 0)",
    ),
    "kernel-selective-groups-share-the-first": (
        TILES,
        "load_rows(B, o_t * G + i_g",
        "load_rows(B, o_t * G",
    ),
    "kernel-selective-groups-are-interleaved": (
        TILES,
        "i_d // NP * P + o_p, o_p < P",
        "i_d // NP + o_p * G, o_p < P",
    ),
    "kernel-selective-decays-into-the-next-sequence": (
        TILES,
        "m_next = (o_c + 1 < length)",
        "m_next = (o_c + 1 < T)",
    ),
    "kernel-selective-sequences-share-a-tile": (
        TILES,
        "start // BT + i_s",
        "start // BT",
    ),
    "kernel-selective-offsets-before-the-start": (
        TILES,
        "start = tl.minimum(tl.maximum(start, 0), T)",
        "start = tl.minimum(start, T)",
    ),
    "kernel-selective-sequence-past-the-end": (
        TILES,
        "stop = tl.minimum(tl.maximum(stop, start), T)",
        "stop = tl.maximum(stop, start)",
    ),
    "kernel-selective-shares-overlap": (
        TILES,
        "i_d.to(tl.int64) * rows + o_t",
        "i_d.to(tl.int64) * T + o_t",
    ),
    "kernel-selective-keeps-the-undecayed": (
        TILES,
        "b_kept = b_a * b_hs",
        "b_kept = b_hs",
    ),
    "kernel-selective-skip-has-no-gradient": (
        TILES,
        "b_dx += b_skip[None, :] * b_dy",
        "b_dx += 0 * b_dy",
    ),
    "kernel-selective-offsets-unchecked-on-the-host": (
        TILES,
        "    check_offsets_on_host(cu_seqlens, x.shape[1])\n",
        "",
    ),
}
