"""In whole chunks, TTT-Linear's kernels, and memories beside attention."""

DEEP, LAYERS = "fastweights/deep", "fastweights/layers"
KERNEL, BESIDE = "fastweights/kernels/ttt.py", f"{LAYERS}/titans_attention.py"
CONTEXT = f"{LAYERS}/titans_context.py"
OPERATOR = f"{DEEP}/ttt_operator.py"
COST = "fastweights_lab/bench/cost.py"
CHOICE, MESA = f"{DEEP}/backends.py", "fastweights/kernels/mesa.py"
WHOLE = "deep/test_whole.py"
TESTS = {
    f"{DEEP}/whole.py": WHOLE,
    OPERATOR: "kernels/test_ttt.py",
    KERNEL: "kernels/test_ttt.py",
    MESA: "kernels/test_mesa.py",
    CHOICE: "kernels/test_ttt.py",
    COST: "lab/test_bench_deep.py",
    BESIDE: "layers/test_titans_attention.py",
    CONTEXT: "layers/test_titans_attention.py",
}
MUTANTS = {
    "mesa-kernel-knows-no-token-of-its-own": (
        MESA,
        "m_D = o_t[:, None] >= o_t[None, :]",
        "m_D = o_t[:, None] > o_t[None, :]",
    ),
    "mesa-kernel-forgets-within-a-chunk-only": (
        MESA,
        "        b_S *= tl.exp(b_last)\n",
        "",
    ),
    "mesa-kernel-adds-its-own-decay": (
        MESA,
        "tl.exp(b_last - b_G) * b_beta",
        "tl.exp(b_last) * b_beta",
    ),
    "mesa-kernel-without-its-ridge": (
        MESA,
        "        b_Ap += b_ridge[None, :] * b_p\n",
        "",
    ),
    "mesa-kernel-without-what-entered": (
        MESA,
        "b_Ap = dot(b_p, b_S, None, PRECISION, WIDE) * b_G",
        "b_Ap = 0 * dot(b_p, b_S, None, PRECISION, WIDE) * b_G",
    ),
    "mesa-kernel-steps-uphill": (
        MESA,
        "b_r -= b_step[:, None] * b_Ap",
        "b_r += b_step[:, None] * b_Ap",
    ),
    "mesa-kernel-takes-the-steepest-way": (
        MESA,
        "b_p = b_r + (b_rr / b_before)[:, None] * b_p",
        "b_p = b_r",
    ),
    "mesa-kernel-divides-by-nothing": (
        MESA,
        "b_step = b_rr / tl.maximum(tl.sum(b_p * b_Ap, axis=1), TINY)",
        "b_step = b_rr / tl.sum(b_p * b_Ap, axis=1)",
    ),
    "mesa-kernel-lets-infinities-in": (
        MESA,
        "tl.maximum(load_row(g, rows, H, BT), LEAST_GATE)",
        "load_row(g, rows, H, BT)",
    ),
    "mesa-kernel-begins-with-nothing": (
        MESA,
        "b_S = tl.load(initial_state + o_S, mask=m_S, other=0.0)",
        "b_S = tl.zeros([BK, BN], dtype=tl.float32)",
    ),
    "whole-groups-begin-anew": (
        f"{DEEP}/whole.py",
        "        *state, outputs = checkpoint(",
        "        *_, outputs = checkpoint(",
    ),
    "whole-nothing-is-computed-again": (
        f"{DEEP}/whole.py",
        "count > 2 * GROUP",
        "count > 2 * GROUP * count",
    ),
    "whole-never-scans": (
        f"{DEEP}/whole.py",
        "and private.SCAN:",
        "and not private.SCAN:",
    ),
    "ttt-first-row-for-the-last": (
        f"{DEEP}/ttt.py",
        "partial(_stepped, rows[-1]), weights, more",
        "partial(_stepped, rows[0]), weights, more",
        "deep/test_deep.py",
    ),
    "window-copied-where-nothing-is-padded": (
        f"{LAYERS}/window.py",
        "keys = F.pad(both, (0, 0, 0, padding)) if padding else both",
        "keys = F.pad(both, (0, 0, 0, padding))",
        "lab/test_bench_growth.py",
    ),
    "ttt-old-sums-stay": (
        f"{DEEP}/ttt.py",
        "total = dual.each(torch.zeros_like, since)",
        "pass",
        WHOLE,
    ),
    "titans-chunk-begins-where-the-last-began": (
        f"{DEEP}/titans.py",
        "            base = M\n",
        "",
        "deep/test_deep.py",
    ),
    "ttt-kernel-reads-before-it-writes": (
        KERNEL,
        "m_s = o_t[:, None] >= o_t[None, :]\n        return",
        "m_s = o_t[:, None] > o_t[None, :]\n        return",
    ),
    "ttt-kernel-adds-the-step": (
        KERNEL,
        "b_W -= last * tl.dot(b_kT, b_X",
        "b_W += last * tl.dot(b_kT, b_X",
    ),
    "ttt-kernel-forgets-the-bias": (
        KERNEL,
        "b_b -= last * tl.sum",
        "b_b -= 0 * tl.sum",
    ),
    "ttt-kernel-adds-the-chunk": (
        KERNEL,
        "b_z -= tl.dot(b_A, b_X",
        "b_z += tl.dot(b_A, b_X",
    ),
    "ttt-kernel-target-without-the-key": (
        KERNEL,
        "b_t = b_v.to(tl.float32) - b_k.to(tl.float32)",
        "b_t = b_v.to(tl.float32)",
    ),
    "ttt-kernel-mean-of-padding": (
        KERNEL,
        "return within(b_W - mean(b_W, K), K)",
        "return b_W - mean(b_W, K)",
    ),
    "ttt-kernel-spread-with-the-mean": (
        KERNEL,
        "return within((b_z - b_m) * b_s, K), b_s",
        "return within(b_z * b_s, K), b_s",
    ),
    "ttt-kernel-means-of-the-weights-forgotten": (
        KERNEL,
        "b_W + b_Wm, mask=m_W",
        "b_W, mask=m_W",
    ),
    "ttt-kernel-walks-back-the-wrong-way": (
        KERNEL,
        "b_W += last * tl.dot(b_kT, b_X",
        "b_W -= last * tl.dot(b_kT, b_X",
    ),
    "ttt-kernel-step-without-its-gradient": (
        KERNEL,
        "b_dX *= -last",
        "b_dX *= 0",
    ),
    "ttt-kernel-key-of-the-step": (
        KERNEL,
        "b_dk -= last * tl.dot(b_X, b_dWT",
        "b_dk += last * tl.dot(b_X, b_dWT",
    ),
    "ttt-kernel-spread-without-its-gradient": (
        KERNEL,
        "b_ds = mean(b_dX * b_h, K)",
        "b_ds = 0 * mean(b_dX * b_h, K)",
    ),
    "ttt-kernel-target-without-its-gradient": (
        KERNEL,
        "b_dk += b_dy + tl.dot(b_du_",
        "b_dk += tl.dot(b_du_",
    ),
    "ttt-kernel-last-row-of-the-step": (
        KERNEL,
        "b_drows -= tl.where(o_c == C - 1",
        "b_drows += tl.where(o_c == C - 1",
    ),
    "ttt-kernel-weights-of-the-output-only": (
        KERNEL,
        "b_dw += tl.sum(b_dy * b_u, axis=0)",
        "pass",
    ),
    "ttt-operator-keeps-nothing": (
        OPERATOR,
        "inputs.append(X if keep else None)",
        "inputs.append(None)",
    ),
    "ttt-operator-gradient-of-nothing": (
        OPERATOR,
        "torch.zeros_like(x) if dx is None else",
        "torch.ones_like(x) if dx is None else",
    ),
    "ttt-operator-takes-two-layers": (OPERATOR, "depth == 1 and", ""),
    "ttt-operator-takes-any-gpu": (CHOICE, "and major in LEADING", ""),
    "ttt-operator-takes-fp32": (
        CHOICE,
        "return dtype != torch.float32 and",
        "return",
    ),
    "lact-prenorm-kept-normed": (
        f"{DEEP}/lact.py",
        "if not prenorm:",
        "if True:",
        "deep/test_deep.py",
    ),
    "lact-prenorm-from-the-start": (
        f"{DEEP}/lact.py",
        "stepped: bool | Tensor = False",
        "stepped: bool | Tensor = True",
        "deep/test_deep.py",
    ),
    "lact-prenorm-forgotten-between-calls": (
        f"{DEEP}/lact.py",
        "stepped = position >= chunk_size",
        "stepped = position < 0",
        "deep/test_deep.py",
    ),
    "layer-lact-never-prenorm": (
        f"{LAYERS}/lact.py",
        "prenorm=self.prenorm",
        "prenorm=False",
        "deep/test_published.py",
    ),
    "cost-one-product-fewer": (
        COST,
        "(2 + reads) * weights",
        "(1 + reads) * weights",
    ),
    "cost-bytes-read-once": (
        COST,
        "once + training * (once + more)",
        "once + training * more",
    ),
    "cost-floor-of-both": (COST, "return max(times)", "return sum(times)"),
    "beside-no-persistent-tokens": (
        f"{LAYERS}/window.py",
        "    if always is None:",
        "    if True:",
        "layers/test_titans_attention.py",
    ),
    "beside-gate-without-its-sigmoid": (
        BESIDE,
        "self.memory_norm(m).sigmoid()",
        "self.memory_norm(m)",
    ),
    "beside-layer-attends-to-tokens": (
        BESIDE,
        "a, past = self.attend(m, state, cu_seqlens)",
        "a, past = self.attend(x, state, cu_seqlens)",
    ),
    "context-sees-its-segment": (
        CONTEXT,
        "before = torch.arange(C, device=q.device) <= place[..., None]",
        "before = torch.arange(C, device=q.device) < place[..., None] + 2",
    ),
    "context-recalls-by-the-latest-weights": (
        CONTEXT,
        "h = self.recalled(x_, base, norm)",
        "h = self.recalled(x_, M, norm)",
        "layers/test_layers.py",
    ),
    "context-learns-its-input": (
        CONTEXT,
        "self.learned(M, S, base, a, part, norm)",
        "self.learned(M, S, base, x_, part, norm)",
    ),
    "context-gradients-of-the-latest-weights": (
        CONTEXT,
        "base = each(part.choose, M, base)",
        "base = M",
        "layers/test_layers.py",
    ),
    "context-segment-never-ends": (
        CONTEXT,
        "base = each(part.choose, M, base)",
        "pass",
    ),
    "context-writes-tokens-that-are-not-there": (
        CONTEXT,
        "part.only(values, seen.gather(1, at))",
        "values",
        "layers/test_layers.py",
    ),
    "context-tokens-that-are-not-there-move": (
        CONTEXT,
        "moves = part.only(torch.ones_like(rate), 0.0).mT",
        "moves = torch.ones_like(rate).mT",
        "layers/test_layers.py",
    ),
    "context-passes-hooks-by-in-a-graph-for-any-length": (
        CONTEXT,
        "type(m) in KINDS and is_untouched(m, KINDS[type(m)])",
        "True",
        "deep/test_lengths.py",
    ),
    "context-forgets-autocast-in-a-graph-for-any-length": (
        CONTEXT,
        "enabled=dtype != x.dtype",
        "enabled=False",
        "deep/test_lengths.py",
    ),
}
