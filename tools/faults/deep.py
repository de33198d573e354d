"""In networks as fast weights: gradients, chunks, optimisers, layers."""

DEEP, LAYERS = "fastweights/deep", "fastweights/layers"
LOOP, PUBLIC = "deep/test_deep.py", "deep/test_published.py"
LENGTHS, REFUSED = "deep/test_lengths.py", "deep/test_arguments.py"
PIECES, BEYOND = "layers/test_layers.py", "fastweights/reference/beyond.py"
TESTS = {
    f"{DEEP}/chunks.py": LOOP,
    f"{DEEP}/dual.py": LOOP,
    f"{DEEP}/ttt.py": LOOP,
    f"{DEEP}/titans.py": LOOP,
    f"{DEEP}/lact.py": LOOP,
    f"{DEEP}/mesa.py": LOOP,
    f"{DEEP}/newton_schulz.py": LOOP,
    f"{DEEP}/optimisers.py": LOOP,
    f"{DEEP}/models.py": PUBLIC,
    f"{LAYERS}/ttt.py": PUBLIC,
    f"{LAYERS}/titans.py": PUBLIC,
    f"{LAYERS}/mesanet.py": PUBLIC,
    f"{LAYERS}/lact.py": PIECES,
    f"{LAYERS}/rows.py": PIECES,
    f"{LAYERS}/window.py": "layers/test_window.py",
    BEYOND: "reference/test_beyond.py",
}
MUTANTS = {
    "lact-second-matrix-not-turned": (
        f"{DEEP}/lact.py",
        "return [m0, m1.mT, m2]",
        "return [m0, m1, m2]",
        PUBLIC,
    ),
    "newton-schulz-without-the-matrix-itself": (
        f"{DEEP}/newton_schulz.py",
        "a * one + b * A",
        "one + b * A",
    ),
    "deep-norm-slope-without-its-parentheses": (
        f"{DEEP}/dual.py",
        "return (d - unit * (d * unit).mean(-1, keepdim=True)) * scale",
        "return d - unit * (d * unit).mean(-1, keepdim=True) * scale",
    ),
    "deep-norm-slope-without-the-mean": (
        f"{DEEP}/dual.py",
        "d = d - d.mean(-1, keepdim=True)",
        "pass",
    ),
    "titans-products-of-four-factors-at-most": (
        f"{DEEP}/titans.py",
        "while reach < a.shape[-1]:",
        "while reach < min(a.shape[-1], 4):",
    ),
    "titans-products-beyond-the-token": (
        f"{DEEP}/titans.py",
        "return running(factors).mT.tril()",
        "return running(factors).mT",
    ),
    "ttt-places-from-zero": (
        f"{LAYERS}/ttt.py",
        "places = torch.ones_like(learned).cumsum(0)",
        "places = torch.ones_like(learned).cumsum(0) - 1 + 1e-6",
    ),
    "deep-gelu-slope-flipped": (
        f"{DEEP}/dual.py",
        "return (1 + t + z * (1 - t.square()) * change) / 2",
        "return (1 + t - z * (1 - t.square()) * change) / 2",
    ),
    "deep-bias-without-its-input-of-one": (
        f"{DEEP}/dual.py",
        "(x @ found.inputs[i].mT + 1)",
        "(x @ found.inputs[i].mT)",
    ),
    "deep-dual-adds-the-gradient": (
        f"{DEEP}/dual.py",
        "z = z - scores",
        "z = z + scores",
    ),
    "titans-carry-left-out-of-the-state": (
        f"{DEEP}/titans.py",
        "partial(_blend, kept, reached)",
        "partial(_blend, kept, None)",
    ),
    "titans-decay-left-out-of-the-state": (
        f"{DEEP}/titans.py",
        "M = factor(keep, M) * M - moved",
        "M = M - moved",
    ),
    "ttt-residual-of-the-output": (
        f"{DEEP}/ttt.py",
        "return found, q + dual.layer_norm(z, norm)[0]",
        "return found, z + dual.layer_norm(z, norm)[0]",
    ),
    "ttt-target-without-the-key": (
        f"{DEEP}/ttt.py",
        "v - k, norm",
        "v, norm",
    ),
    "ttt-reads-before-it-writes": (
        f"{DEEP}/ttt.py",
        "* eta[:, :, None]).tril()",
        "* eta[:, :, None]).tril(-1)",
    ),
    "ttt-forgets-the-gradients-of-the-last-piece": (
        f"{DEEP}/ttt.py",
        "None, -row, share)",
        "None, 0 * row, share)",
    ),
    "ttt-last-row-for-the-first": (
        f"{DEEP}/ttt.py",
        "partial(_stepped, rows[-1]), W, more",
        "partial(_stepped, rows[0]), W, more",
    ),
    "titans-momentum-flipped": (
        f"{DEEP}/titans.py",
        "share = (reach @ fast)",
        "share = (fast @ reach).mT",
    ),
    "titans-gradient-of-the-last-weights": (
        f"{DEEP}/titans.py",
        "found = dual.gradients(base,",
        "found = dual.gradients(M,",
    ),
    "titans-masked-tokens-move": (
        f"{DEEP}/titans.py",
        "moves = part.take(torch.ones_like(rate), 0.0).mT",
        "moves = part.take(torch.ones_like(rate)).mT",
    ),
    "titans-products-with-the-first-factor": (
        f"{DEEP}/titans.py",
        ".tril(-1)",
        ".tril(0)",
    ),
    "lact-descends": (
        f"{DEEP}/lact.py",
        "unit_columns(w[i] + steps[i])",
        "unit_columns(w[i] - steps[i])",
    ),
    "lact-rates-of-other-matrices": (
        f"{DEEP}/lact.py",
        "eta[1] * silu * up",
        "eta[2] * silu * up",
    ),
    "lact-reads-after-it-writes": (
        f"{DEEP}/lact.py",
        "for part in layout:\n            w = [W + d",
        "for part in [*layout][1:]:\n            w = [W + d",
    ),
    "lact-norms-of-now": (
        f"{DEEP}/lact.py",
        "unit_columns(w[i] + steps[i]) * norm - W",
        "w[i] + steps[i] - W",
    ),
    "lact-momentum-summed": (
        f"{DEEP}/lact.py",
        "keep = (mean / chunk_size)",
        "keep = mean",
    ),
    "lact-sums-run-on": (
        f"{DEEP}/lact.py",
        "total[i] = part.choose(torch.zeros_like(M[i]), total[i])",
        "pass",
    ),
    "mesa-without-gradients-of-the-matrices": (
        f"{DEEP}/mesa.py",
        "x = x + _Solve.apply(q - Hx - ridge * x, how, *matrices)",
        "x = x + _Solve.apply(q, how, *matrices)",
    ),
    "mesa-without-its-ridge": (
        f"{DEEP}/mesa.py",
        "Ap = product(p) + ridge * p",
        "Ap = product(p)",
    ),
    "mesa-solves-nothing-again-for-gradients": (
        f"{DEEP}/mesa.py",
        "dx = solve(dx.contiguous(), ctx.how, *matrices)",
        "pass",
    ),
    "deep-position-of-any-dtype": (
        f"{DEEP}/arguments.py",
        "dtypes | dict.fromkeys(given, WHOLE)",
        "dtypes | {n: (x.dtype,) for n, x in given.items()}",
        REFUSED,
    ),
    "deep-lengths-beyond-the-call": (
        f"{DEEP}/arguments.py",
        'T if name == "lengths" else math.inf',
        "math.inf",
        REFUSED,
    ),
    "deep-state-of-integers": (
        f"{DEEP}/arguments.py",
        "check_kinds(kinds, dict.fromkeys(kinds, DTYPES))",
        "pass",
        REFUSED,
    ),
    "deep-position-without-a-state": (
        f"{DEEP}/arguments.py",
        "and after.any():",
        "and False:",
        REFUSED,
    ),
    "mesa-ridge-of-nothing": (
        f"{DEEP}/mesa.py",
        "(ridge <= 0) | ridge.isinf()",
        "(ridge < 0) | ridge.isinf()",
        REFUSED,
    ),
    "mesa-reads-what-it-saved-twice": (
        f"{DEEP}/mesa.py",
        "[None] * len(matrices)",
        "[None] * len(ctx.saved_tensors)",
        LENGTHS,
    ),
    "newton-schulz-norm-in-half-precision": (
        f"{DEEP}/newton_schulz.py",
        ".to(wide(G.dtype))",
        "",
    ),
    "newton-schulz-squares-what-is-large": (
        f"{DEEP}/newton_schulz.py",
        "X = X / most",
        "most = 1.0",
    ),
    "lact-errors-below-fp16": (
        f"{DEEP}/lact.py",
        "if x.dtype != torch.float16:",
        "if True:",
    ),
    "lact-rates-without-a-gradient": (
        f"{DEEP}/lact.py",
        "start[0].where(always, rates.sum() + momentum.sum())",
        "start[0]",
        LENGTHS,
    ),
    "any-length-without-a-gradient": (
        "fastweights/ops/any_length.py",
        "return None, grads, None",
        "return None, [None for _ in grads], None",
        LENGTHS,
    ),
    "any-length-is-never-open": (
        "fastweights/ops/any_length.py",
        "return not has_static_value(T)",
        "return False",
        LENGTHS,
    ),
    "newton-schulz-on-the-longer-side": (
        f"{DEEP}/newton_schulz.py",
        "(X.mT if tall else X)",
        "X",
    ),
    "newton-schulz-one-step-fewer": (
        f"{DEEP}/newton_schulz.py",
        "    (2.8366, -3.0525, 1.2012),\n",
        "",
    ),
    "newton-schulz-root-of-nothing": (
        f"{DEEP}/newton_schulz.py",
        "norm = _or_one(X.square().sum((-2, -1), keepdim=True)).sqrt()",
        "norm = X.square().sum((-2, -1), keepdim=True).sqrt()",
    ),
    "chunk-never-ends": (
        f"{DEEP}/chunks.py",
        "end >= start + self.size",
        "end > start + self.size",
    ),
    "chunk-place-forgotten-by-one-token": (
        f"{DEEP}/chunks.py",
        "valid & (self.first == self.size - 1)",
        "valid & (self.first == self.size)",
    ),
    "chunk-counts-tokens-that-are-not-there": (
        f"{DEEP}/chunks.py",
        "valid = (token >= 0) & (token < self.lengths[:, None])",
        "valid = token >= 0",
    ),
    "stale-gradients-that-are-fresh": (
        f"{DEEP}/optimisers.py",
        "slope = gradient(chunk.start if base is None else base)\n"
        "        params, memory = optimiser(\n            params,",
        "slope = gradient(params)\n"
        "        params, memory = optimiser(\n            params,",
    ),
    "summed-steps-from-the-token-before": (
        f"{DEEP}/optimisers.py",
        "                chunk.start, lambda _: total,",
        "                params, lambda _: total,",
    ),
    "newton-ridge-forgotten": (
        f"{DEEP}/optimisers.py",
        "slope = slope + (1 - keep) * ridge[..., None] * params",
        "pass",
    ),
    "layer-ttt-positions-run-on": (
        f"{LAYERS}/ttt.py",
        "at = at % self.mini_batch",
        "pass",
    ),
    "layer-ttt-turns-halves": (
        f"{LAYERS}/ttt.py",
        "halves = x.unflatten(-1, (-1, 2)).mT.flatten(-2)",
        "halves = x",
    ),
    "layer-titans-rate-of-half-the-loss": (
        f"{LAYERS}/titans.py",
        "rate = 2 * self.max_rate",
        "rate = self.max_rate",
    ),
    "layer-titans-keeps-what-it-should-forget": (
        f"{LAYERS}/titans.py",
        "F.logsigmoid(-c)",
        "F.logsigmoid(c)",
    ),
    "layer-mesanet-convolves-values": (
        f"{LAYERS}/mesanet.py",
        "v.unflatten(-1, (H, -1)),",
        "F.silu(v).unflatten(-1, (H, -1)),",
    ),
    "layer-lact-memory-of-unscaled-keys": (
        f"{LAYERS}/lact.py",
        "F.silu(full(t) * scales[i] + offsets[i])",
        "F.silu(full(t) * scales[0] + offsets[0])",
        PUBLIC,
    ),
    "layer-lact-values-without-silu": (
        f"{LAYERS}/lact.py",
        "rows.spread(F.silu(v).unflatten(-1, split))",
        "rows.spread(v.unflatten(-1, split))",
        PUBLIC,
    ),
    "layer-rows-forget-how-far-they-are": (
        f"{LAYERS}/rows.py",
        "return self.position + self.count",
        "return self.count",
    ),
    "window-one-token-wider": (
        f"{LAYERS}/window.py",
        "near = (j >= i) & (j <= i + before)",
        "near = (j >= i - 1) & (j <= i + before)",
    ),
    "window-sees-what-is-not-there": (
        f"{LAYERS}/window.py",
        "mask = (near & there[..., None, :])",
        "mask = (near | ~there[..., None, :])",
    ),
    "beyond-rwkv7-erases-first": (
        BEYOND,
        "erased = outer(a * kappa, read(S, kappa))",
        "erased = outer(a * kappa, read(g.exp()[..., None] * S, kappa))",
    ),
    "beyond-delta-product-forgets-each-time": (
        BEYOND,
        "        S, o = deltanet(S, q, k[..., i, :]",
        "        S = g.exp()[..., None, None] ** (i > 0) * S\n"
        "        S, o = deltanet(S, q, k[..., i, :]",
    ),
    "beyond-gdn2-erases-by-k": (BEYOND, "read(S, b * k)", "read(S, k)"),
    "beyond-comba-erases-by-k": (
        BEYOND,
        "(v - read(S, p))",
        "(v - read(S, k))",
    ),
    "beyond-mamba3-old-write-undecayed": (
        BEYOND,
        "(1 - share) * dt * g.exp(), share",
        "(1 - share) * dt, share",
    ),
    "beyond-log-linear-merges-too-little": (
        BEYOND,
        "merged = S[..., :low, :, :]",
        "merged = S[..., 1:low, :, :]",
    ),
    "beyond-path-turns-the-new-key": (
        BEYOND,
        "return softmax((keys, values), q, k, v)",
        "return softmax((keys, values), q, k - beta[..., None] * w, v)",
    ),
    "beyond-atlas-window-one-longer": (
        BEYOND,
        "keys = torch.cat([keys, k[..., None, :]], -2)[..., -window:, :]",
        "keys = torch.cat([keys, k[..., None, :]], -2)[..., -window - 1 :, :]",
    ),
}
