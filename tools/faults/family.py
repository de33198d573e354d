"""In the recurrence: its loops, its chunks in PyTorch, its kernels."""

(
    STEPS,
    PARALLEL,
    CHUNKWISE,
    BACKWARD,
    BACKEND,
    ARGUMENTS,
    OPS,
    FAMILY,
    MAPS,
    TILE,
    GATES,
    INVERSE,
    INTRA,
    GRADIENTS,
    SCAN,
    COMPOSE,
    STAGES,
    DECODE,
) = (
    f"{file}.py"
    for file in (
        "fastweights/reference/steps",
        "fastweights/reference/parallel",
        "fastweights/reference/chunkwise",
        "fastweights/reference/chunkwise_backward",
        "fastweights/reference/backend",
        "fastweights/arguments",
        "fastweights/ops/recurrence",
        "fastweights/ops/family",
        "fastweights/feature_maps",
        "fastweights/kernels/tile",
        "fastweights/kernels/family/gates",
        "fastweights/kernels/family/inverse",
        "fastweights/kernels/family/intra",
        "fastweights/kernels/family/intra_backward",
        "fastweights/kernels/family/scan",
        "fastweights/kernels/family/compose",
        "fastweights/kernels/family/stages",
        "fastweights/kernels/decode",
    )
)
TESTS = {
    STEPS: "reference/test_steps.py",
    PARALLEL: "reference/test_parallel.py",
    CHUNKWISE: "reference/test_chunkwise.py",
    BACKWARD: "reference/test_chunkwise_backward.py",
    BACKEND: "ops/test_recurrence.py",
    ARGUMENTS: "ops/test_recurrence.py",
    OPS: "ops/test_recurrence.py",
    FAMILY: "ops/test_family.py",
    MAPS: "test_feature_maps.py",
    TILE: "kernels/test_family.py",
    GATES: "kernels/test_family.py",
    INVERSE: "kernels/test_family.py",
    INTRA: "kernels/test_family.py",
    GRADIENTS: "kernels/test_family.py",
    SCAN: "kernels/test_family.py",
    COMPOSE: "kernels/test_family.py",
    STAGES: "kernels/test_family.py",
    DECODE: "kernels/test_decode.py",
}

MUTANTS = {
    "outer-transposed-index": (
        STEPS,
        'einsum("...kv,...k->...v", S, q)',
        'einsum("...kv,...k->...v", S.mT.reshape(S.shape), q)',
    ),
    "linear-subtracts": (
        STEPS,
        "S = S + outer(k, v)",
        "S = S - outer(k, v)",
    ),
    "retention-grows": (
        STEPS,
        "S = g.exp()[..., None, None] * S + outer(k, v)",
        "S = (-g).exp()[..., None, None] * S + outer(k, v)",
    ),
    "mamba2-loses-its-step-size": (
        STEPS,
        "outer(k, dt[..., None] * v)",
        "outer(k, v)",
    ),
    "gla-gates-the-values": (
        STEPS,
        "S = g.exp()[..., :, None] * S + outer(k, v)",
        "S = S + outer(g.exp() * k, v)",
    ),
    "deltanet-adds-the-error": (
        STEPS,
        "(v - read(S, k)))",
        "(v + read(S, k)))",
    ),
    "gated-deltanet-corrects-first": (
        STEPS,
        "    S = g.exp()[..., None, None] * S\n"
        "    return deltanet(S, q, k, v, beta)",
        "    S, o = deltanet(S, q, k, v, beta)\n"
        "    return g.exp()[..., None, None] * S, o",
    ),
    "kda-drops-its-gate": (
        STEPS,
        "S = g.exp()[..., :, None] * S\n",
        "S = g.exp().mean(-1)[..., None, None] * S\n",
    ),
    "recurrence-forgets-twice": (
        STEPS,
        "        S = g.exp()[..., None] * S\n",
        "        S = (2 * g).exp()[..., None] * S\n",
    ),
    "softmax-step-grows-at-the-front": (
        STEPS,
        "torch.cat([cache[1], v[..., None, :]], dim=-2)",
        "torch.cat([v[..., None, :], cache[1]], dim=-2)",
    ),
    "mask-one-key-short": (
        PARALLEL,
        "return j <= i + (num_keys - num_queries)",
        "return j < i + (num_keys - num_queries)",
    ),
    "softmax-without-scale": (
        PARALLEL,
        'scores = scale * torch.einsum("bihk,bjhk->bhij", q, k)\n    if',
        'scores = torch.einsum("bihk,bjhk->bhij", q, k)\n    if',
    ),
    "online-forgets-to-rescale-the-sum": (
        PARALLEL,
        "total = rescale * total + p.sum(-1)",
        "total = total + p.sum(-1)",
    ),
    "decays-diagonal-with-a-gradient": (
        PARALLEL,
        "1 / math.log(2)).tril_(-1)",
        "1 / math.log(2)).tril_()",
    ),
    "scores-sign-of-the-exponent": (
        PARALLEL,
        "D = (G[..., :, None, :] - G[..., None, :, :])",
        "D = (G[..., None, :, :] - G[..., :, None, :])",
    ),
    "parallel-sums-over-queries": (
        PARALLEL,
        'torch.einsum("bhij,bjhv->bihv", A, v)',
        'torch.einsum("bhji,bjhv->bihv", A, v)',
    ),
    "gates-summed-without-their-own": (
        CHUNKWISE,
        "exact = running_sum(g)",
        "exact = running_sum(g) - g",
    ),
    "query-scores-lose-their-diagonal": (
        CHUNKWISE,
        "return G, decayed_scores(q, k, exact), None",
        "return G, decayed_scores(q, k, exact).tril(-1), None",
    ),
    "inverse-drops-beta": (
        CHUNKWISE,
        "unit_lower_inverse((beta * Akk).tril_(-1))",
        "unit_lower_inverse(Akk.tril(-1))",
    ),
    "inverse-wrong-neighbours": (
        CHUNKWISE,
        "joins = (row % 2 == 1) & (column == row - 1)",
        "joins = (row % 2 == 0) & (column == row - 1)",
    ),
    "scan-drops-beta": (
        CHUNKWISE,
        "P @ (beta * (v -",
        "P @ (1 * (v -",
    ),
    "scan-reads-undecayed-state": (
        CHUNKWISE,
        "o = decayed(q_n, G_n) @ S",
        "o = q_n @ S",
    ),
    "scan-drops-scale": (
        CHUNKWISE,
        "outputs.append(scale * o)",
        "outputs.append(o)",
    ),
    "sum-after-counts-its-own-gate": (
        CHUNKWISE,
        "F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip",
        "g.flip",
    ),
    "rest-as-a-difference": (
        CHUNKWISE,
        "rest = sum_after(g)",
        "rest = G[..., -1:, :] - G",
    ),
    "strip-starts-one-late": (
        CHUNKWISE,
        "(start - G[..., :s, :]).to",
        "(start - G[..., 1 : s + 1, :]).to",
    ),
    "reverse-cumsum-forward": (
        BACKWARD,
        "return x.flip(-2).cumsum(-2).flip(-2)",
        "return x.cumsum(-2)",
    ),
    "sum-before-counts-its-own": (
        BACKWARD,
        "F.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)",
        "x.cumsum(-2)",
    ),
    "backward-strip-starts-one-late": (
        BACKWARD,
        "(start - G[..., before, :]).to",
        "(start - G[..., 1 : s + 1, :]).to",
    ),
    "columns-undecayed-until-their-strip": (
        BACKWARD,
        "+= until * (A_before.mT",
        "+= (A_before.mT",
    ),
    "beta-row-forgotten": (
        BACKWARD,
        "dk_row = beta * answer",
        "dk_row = answer",
    ),
    "beta-column-forgotten": (
        BACKWARD,
        "[dAqk, dM], [q, beta * k]",
        "[dAqk, dM], [q, k]",
    ),
    "columns-gain-from-their-gate": (
        BACKWARD,
        "dk_row - dk_col\n",
        "dk_row + dk_col\n",
    ),
    "own-scores-counted-to-the-gate": (
        BACKWARD,
        "torch.stack(A).tril_(-1)",
        "torch.stack(A)",
    ),
    "state-gradient-without-the-rule": (
        BACKWARD,
        "dS = dS - decayed(k_n",
        "dS = dS + decayed(k_n",
    ),
    "state-gradient-decays-late": (
        BACKWARD,
        "dS = decayed(dS, total) +",
        "dS = dS +",
    ),
    "outputs-gradient-unscaled": (
        BACKWARD,
        "(q, k, v, scale * do)",
        "(q, k, v, do)",
    ),
    "inverse-gradient-sign": (
        BACKWARD,
        "dM = (-y @ v_new.mT)",
        "dM = (y @ v_new.mT)",
    ),
    "kept-state-has-no-gate": (
        BACKWARD,
        "            + per_gate(decayed(kept, G[..., -1:, :]), G)\n",
        "",
    ),
    "written-keys-in-the-reverse-sum": (
        BACKWARD,
        "reverse_cumsum(per_gate(change, G))\n"
        "            + sum_before(per_gate(k * dk_state, G))",
        "reverse_cumsum(per_gate(change - k * dk_state, G))\n"
        "            + per_gate((k * dk_state).sum(-2, keepdim=True), G)",
    ),
    "lone-chunk-forgets-beta": (
        BACKWARD,
        "v_new, y = P @ (beta * v), P.mT @ y",
        "v_new, y = P @ v, P.mT @ y",
    ),
    "heads-tiled-instead-of-repeated": (
        BACKEND,
        "x.repeat_interleave(groups, dim=2)",
        "x.repeat(1, 1, groups, 1)",
    ),
    "groups-round-before-they-sum": (
        BACKEND,
        "x.unflatten(2, (q.shape[2], -1)).sum(3) for",
        "x.to(q.dtype).unflatten(2, (q.shape[2], -1)).sum(3) for",
    ),
    "groups-summed-across": (
        BACKEND,
        "x.unflatten(2, (q.shape[2], -1)).sum(3)",
        "x.unflatten(2, (-1, q.shape[2])).sum(2)",
    ),
    "final-state-has-no-gradient": (
        BACKEND,
        "dS=None if dstate is None else dstate[n],",
        "dS=None,",
    ),
    "scale-not-the-root": (
        OPS,
        "scale = q.shape[-1] ** -0.5 if",
        "scale = q.shape[-1] ** -1.0 if",
    ),
    "loop-drops-scale": (
        OPS,
        "tokens[0] = scale * tokens[0]",
        "tokens[0] = tokens[0]",
    ),
    "packed-starts-from-the-last-state": (
        OPS,
        "scan(recurrence, state[n], *",
        "scan(recurrence, state[:1], *",
    ),
    "autocast-reaches-the-products": (
        OPS,
        '    ran(f"{backend} forward")\n    with without_autocast(q):',
        '    ran(f"{backend} forward")\n    with torch.no_grad():',
    ),
    "autocast-reaches-the-backward": (
        OPS,
        '    ran(f"{backend} backward")\n    with without_autocast(q):',
        '    ran(f"{backend} backward")\n    with torch.no_grad():',
    ),
    "autocast-leaves-its-operands": (
        OPS,
        "x.to(dtype) if x.dtype in narrow else x",
        "x",
    ),
    "fixed-gate-rounds-before-it-sums": (
        OPS,
        "g.to(wide(q.dtype)).expand",
        "g.expand",
    ),
    "offsets-may-decrease": (
        ARGUMENTS,
        "increases = all(a <= b for",
        "increases = any(a <= b for",
    ),
    "normaliser-multiplies": (
        FAMILY,
        "(o / (z + eps))",
        "(o * (z + eps))",
    ),
    "retnet-one-head-late": (
        FAMILY,
        "torch.exp2(-5 - h)",
        "torch.exp2(-6 - h)",
    ),
    "fourier-shrinks": (
        MAPS,
        "size = (0.5 * z.square()",
        "size = (-0.5 * z.square()",
    ),
    "positive-without-the-norm": (
        MAPS,
        "(z @ w.T - size).exp()",
        "(z @ w.T).exp()",
    ),
    "directions-of-length-one": (
        MAPS,
        "torch.cat(blocks)[:num_features] * lengths",
        "torch.cat(blocks)[:num_features]",
    ),
    "kernel-gate-grows-to-the-exit": (
        INTRA,
        "b_out = tl.where(weak, 0.5, 1.0) * b_total - b_G",
        "b_out = tl.where(weak, 0.5, 1.0) * b_total + b_G",
    ),
    "kernel-inverse-adds": (
        INVERSE,
        "return b_R - add_product",
        "return b_R + add_product",
    ),
    "kernel-pairs-of-the-other-half": (
        GATES,
        "m_block & ((level == first) | (m_same == 0))",
        "m_block & ((level == first) | m_same)",
    ),
    "kernel-decays-untransposed": (
        GATES,
        "b_D = -b_D",
        "b_D = b_D",
    ),
    "kernel-inverse-in-fp16-always": (
        INTRA,
        "(steps < 2.05) & (largest < 1e3)",
        "(steps >= 0.0)",
    ),
    "kernel-scan-answers-with-the-wrong-sign": (
        SCAN,
        "b_e = b_v - b_e",
        "b_e = b_v + b_e",
    ),
    "kernel-scan-reads-as-at-the-exit": (
        SCAN,
        "b_read = scale * tl.where(weak, b_in, 1.0)",
        "b_read = scale",
    ),
    "kernel-scan-backward-adds-the-correction": (
        SCAN,
        "b_y = -b_y",
        "b_y = b_y",
    ),
    "kernel-dbeta-in-fp16": (
        SCAN,
        "b_dbeta = tl.sum(b_e * b_y",
        "b_dbeta = tl.sum(b_e + b_y",
    ),
    "kernel-descriptor-goes-on-past-the-end": (
        TILE,
        "rows = (end - start).to(tl.int32)",
        "rows = (end - start).to(tl.int32) + TILES.BT",
    ),
    "kernel-descriptor-starts-with-the-first": (
        TILE,
        "p_x = x + start.to(tl.int64) * (TILES.H * TILES.D)",
        "p_x = x + 0 * start.to(tl.int64) * (TILES.H * TILES.D)",
    ),
    "kernel-segments-start-from-the-first": (
        SCAN,
        "from_start = (first == 0) & reaches_all",
        "from_start = (first >= 0) & reaches_all",
    ),
    "kernel-segments-end-in-each": (
        SCAN,
        "has_after = last < NT",
        "has_after = last < 0",
    ),
    "kernel-maps-have-values": (
        SCAN,
        "c_v = tl.where(is_map, (end - start).to(tl.int32), c)",
        "c_v = tl.where(is_map, c, c)",
    ),
    "kernel-maps-that-forget-are-the-identity": (
        SCAN,
        "i_j = tl.where(reaches_all, i_v - META.NV, -1)",
        "i_j = tl.where(reaches_all, i_v - META.NV, i_v - META.NV)",
    ),
    "kernel-state-enters-far-from-the-end": (
        SCAN,
        "from_start = (first == 0) & reaches_all",
        "from_start = first == 0",
    ),
    "kernel-segments-are-composed-from-the-second": (
        COMPOSE,
        "for i in range(1, segments - 1):",
        "for i in range(2, segments - 1):",
    ),
    "kernel-segments-composed-forward-in-the-backward": (
        COMPOSE,
        "i_s = segments - 1 - i if BACK else i",
        "i_s = i",
    ),
    "kernel-forgets-too-early": (
        COMPOSE,
        "FORGOTTEN = tl.constexpr(-100.0)",
        "FORGOTTEN = tl.constexpr(-5.0)",
    ),
    "kernel-forgets-the-way": (
        COMPOSE,
        "b_x = tl.cumsum(b_x, axis=0) - b_x",
        "b_x = tl.cumsum(b_x, axis=0) * 40.0",
    ),
    "kernel-forgets-though-keys-are-long": (
        INTRA,
        "b_total += BT * tl.log2(tl.maximum(steps - 1.0, 1.0))",
        "b_total += 0.0 * tl.log2(tl.maximum(steps - 1.0, 1.0))",
    ),
    "kernel-borders-of-a-pack-from-the-sequence": (
        COMPOSE,
        "last = (i_b + 1).to(tl.int64) * (L * BT) - 1",
        "last = start + (i_b + 1).to(tl.int64) * (L * BT) - 1",
    ),
    "kernel-strong-is-not-marked": (
        INTRA,
        "strong_tiles |= tl.max(tl.where(m_weak, 0, 1 << i_k))",
        "strong_tiles |= tl.max(tl.where(m_weak, 0, 0))",
    ),
    "kernel-one-tile-for-another": (
        INTRA,
        "strong_tiles |= tl.max(tl.where(m_weak, 0, 1 << i_k))",
        "strong_tiles = tl.max(tl.where(m_weak, 0, 1 << i_k))",
    ),
    "kernel-folds-whatever-the-decay": (
        GATES,
        "0, LEVELS - deepest)",
        "0, LEVELS)",
    ),
    "kernel-adds-weak-channels-twice": (
        INTRA,
        "b_c = tl.where(m_strong, b_c, 0.0)",
        "b_c = tl.where(m_strong, b_c, b_c)",
    ),
    "kernel-strong-keys-leave-too-early": (
        INTRA,
        "tl.store(p_x, b_x, mask=m_x & m_strong)",
        "tl.store(p_x, b_x, mask=m_x & m_strong & (b_x < 0.0))",
    ),
    "kernel-halves-nothing": (
        GATES,
        "tl.where(m_weak, 0.5 * b_total, 0.0)",
        "tl.where(is_weak(b_total, x), 0.0 * b_total, 0.0)",
    ),
    "kernel-strong-chunks-leave-nothing": (
        GATES,
        "return b_half, tl.exp2(tl.where(m_weak, 0.0, b_total))",
        "return b_half, tl.where(m_weak, 1.0, 0.0)",
    ),
    "kernel-strong-channels-keep-their-state": (
        SCAN,
        "elif DG > 1:\n            b_S *= b_rest",
        "elif DG > 1:\n            b_S *= 1.0",
    ),
    "kernel-strong-channels-keep-their-gradient": (
        SCAN,
        "elif DG > 1:\n            b_dS *= b_rest",
        "elif DG > 1:\n            b_dS *= 1.0",
    ),
    "kernel-folds-pairs-of-rows": (
        GATES,
        "tl.where(deepest == LEVELS - 1, 0, LEVELS - deepest)",
        "LEVELS - deepest",
    ),
    "kernel-does-not-undo-at-the-fold": (
        GATES,
        "b_far = tl.where(level == first, -b_D, b_D)",
        "b_far = b_D",
    ),
    "kernel-folds-again": (
        GATES,
        "m_block & ((level == first) | (m_same == 0))",
        "m_block",
    ),
    "kernel-dk-of-the-correction": (
        GRADIENTS,
        "b_dk += b_err",
        "b_dk -= b_err",
    ),
    "kernel-columns-gain-from-the-gate": (
        GRADIENTS,
        "b_pairs = tl.fma(-b_k.to(tl.float32), b_c, b_pairs)",
        "b_pairs = tl.fma(b_k.to(tl.float32), b_c, b_pairs)",
    ),
    "kernel-strong-columns-gain-from-the-gate": (
        GRADIENTS,
        "b_pairs -= b_kc * b_y",
        "b_pairs += b_kc * b_y",
    ),
    "kernel-columns-decay-like-rows": (
        GRADIENTS,
        "b_c *= tl.exp2(b_G)",
        "b_c *= tl.exp2(-b_G)",
    ),
    "kernel-dbeta-with-beta": (
        GRADIENTS,
        "tl.sum(b_diag, axis=1) / tile.nonzero(b_beta)",
        "tl.sum(b_diag, axis=1) * tile.nonzero(b_beta)",
    ),
    "kernel-gate-forgets-the-state": (
        GRADIENTS,
        "b_dg += tl.load(dkept + i_part)",
        "b_dg -= tl.load(dkept + i_part)",
    ),
    "kernel-decode-adds-the-answer": (
        DECODE,
        "(b_new - b_found)",
        "(b_new + b_found)",
    ),
}
