"""In the layers: gates, norms, states, starts and what they refuse."""

LAYERS = "fastweights/layers"
PARTS, STATE = f"{LAYERS}/parts.py", f"{LAYERS}/state.py"
ATTENTION, SDPA = f"{LAYERS}/attention.py", f"{LAYERS}/sdpa.py"
LAYER = f"{LAYERS}/layer.py"
PIECES, PUBLISHED = "layers/test_layers.py", "layers/test_published.py"
TESTS = {
    PARTS: "layers/test_parts.py",
    STATE: "layers/test_state.py",
    ATTENTION: "layers/test_state.py",
    SDPA: "layers/test_sdpa.py",
    LAYER: "layers/test_arguments.py",
    f"{LAYERS}/arguments.py": "layers/test_arguments.py",
    f"{LAYERS}/convolution.py": PUBLISHED,
    f"{LAYERS}/kda.py": PUBLISHED,
    f"{LAYERS}/mamba2.py": PUBLISHED,
    f"{LAYERS}/mlstm.py": PUBLISHED,
}
MUTANTS = {
    "layer-beta-in-fp32-only": (
        PARTS,
        "beta = full(logits).sigmoid()",
        "beta = logits.float().sigmoid()",
        PUBLISHED,
    ),
    "layer-mamba2-norms-before-the-gate": (
        f"{LAYERS}/mamba2.py",
        "y = self.norm(y.unflatten(-1, (self.G, -1))).to(u.dtype)",
        "y = self.norm(full(o).flatten(2).unflatten(-1, (self.G, -1)))",
    ),
    "layer-mamba2-values-without-their-step": (
        f"{LAYERS}/mamba2.py",
        "(dt[..., None] * u).to(u.dtype)",
        "u",
    ),
    "layer-kda-gates-by-silu": (
        f"{LAYERS}/kda.py",
        'OutputNorm(V, "sigmoid"',
        'OutputNorm(V, "silu"',
    ),
    "layer-mlstm-norm-without-its-mean": (
        f"{LAYERS}/mlstm.py",
        "center=True",
        "center=False",
    ),
    "layer-mlstm-gates-the-other-way-round": (
        f"{LAYERS}/mlstm.py",
        "i, f = (self.cap",
        "f, i = (self.cap",
    ),
    "layer-silu-goes-with-the-convolution": (
        f"{LAYERS}/convolution.py",
        "x = F.silu(x) if self.activation else x",
        "pass",
    ),
    "layer-rotary-starts-anew": (
        STATE,
        "return here if before is None else here + before[:, None]",
        "return here",
        PIECES,
    ),
    "layer-packed-positions-run-on": (
        STATE,
        "here = here - cu_seqlens[row].to(here.dtype)",
        "pass",
        PIECES,
    ),
    "layer-state-is-new-without-gradients": (
        STATE,
        "if torch.is_grad_enabled():\n        return after\n    state.copy_",
        "return after\n    state.copy_",
    ),
    "layer-state-changes-with-gradients": (
        STATE,
        "cu_seqlens is not None or torch.is_grad_enabled():",
        "cu_seqlens is not None:",
        PIECES,
    ),
    "layer-copied-state-forgets-its-length": (
        STATE,
        "self.used = max(self.used, other.used)",
        "pass",
    ),
    "layer-softmax-counts-padding": (
        ATTENTION,
        "position=rows.after(), used=k.shape[1]",
        "position=rows.after() * 0 + k.shape[1], used=k.shape[1]",
        PIECES,
    ),
    "layer-softmax-overwrites-with-gradients": (
        ATTENTION,
        "keys, values = keys.clone(), values.clone()",
        "pass",
    ),
    "layer-softmax-has-room-for-one-fewer": (
        ATTENTION,
        "if x.shape[1] >= capacity:",
        "if x.shape[1] > capacity:",
    ),
    "layer-packed-sequences-see-each-other": (
        SDPA,
        "same = own[:, None] == row",
        "same = own[:, None] >= row",
    ),
    "layer-packed-tiles-look-ahead": (
        SDPA,
        "same.tril(row.shape[0] - own.shape[0])",
        "same.tril(row.shape[0])",
    ),
    "layer-packed-tiles-keep-their-masks": (
        SDPA,
        "checkpoint(\n            tile,",
        "(lambda f, *x, **_: f(*x))(\n            tile,",
    ),
    "layer-packed-nan-reaches-the-others": (
        SDPA,
        "if readable(cu_seqlens):",
        "if False:",
        "layers/test_layers.py",
    ),
    "layer-packed-by-one-mask": (SDPA, "if T <= TILE:", "if True:"),
    "layer-packed-kernels-look-ahead": (
        SDPA,
        '"window_size": (-1, 0)',
        '"window_size": (-1, -1)',
    ),
    "layer-packed-kernels-by-sequence-numbers": (
        SDPA,
        "offsets = offsets.to(torch.int32)",
        "offsets = offsets.clone()",
    ),
    "layer-packed-kernels-without-shared-heads": (
        SDPA,
        "q.shape[2] != k.shape[2]} if",
        "False} if",
    ),
    "layer-packed-kernels-read-the-longest": (
        SDPA,
        "longest = max(q.shape[1], 2)",
        "longest = max(int(offsets.diff().max()), 2)",
    ),
    "layer-packed-kernels-in-fp32": (SDPA, "or not half or", "or"),
    "layer-packed-kernels-before-ampere": (SDPA, ">= (8, 0)", ">= (7, 0)"),
    "layer-packed-in-fp32-under-autocast": (
        SDPA,
        "    q, k, v = autocast(q, k, v)\n",
        "",
    ),
    "layer-A-drawn-narrow": (
        PARTS,
        "dtype=wide(like.dtype)",
        "dtype=like.dtype",
    ),
    "layer-A-log-uniform": (
        PARTS,
        "uniform(self.A_log, *self.A_range)\n",
        "uniform(self.A_log, *map(math.log, self.A_range)).exp()\n",
    ),
    "layer-rotary-by-the-whole-head": (
        PARTS,
        "theta ** (-j / R)",
        "theta ** (-j / x.shape[-1])",
    ),
    "layer-A-of-nothing": (PARTS, "A.clamp_min(SMALLEST).log()", "A.log()"),
    "layer-dt-of-nothing": (
        PARTS,
        ".exp().clamp_min(SMALLEST)",
        ".exp()",
    ),
    "layer-norm-keeps-what-was-in-memory": (
        PARTS,
        "self.weight.fill_(1)",
        "pass",
    ),
    "layer-flags-unchecked": (LAYER, 'case "bool":', 'case "flag":'),
    "layer-parameters-unmarked": (
        LAYER,
        "if spared(name, parameter):",
        "if False:",
        "layers/test_parts.py",
    ),
    "layer-dtype-unchecked": (
        f"{LAYERS}/arguments.py",
        "and is_product(out, x)\n",
        "and False\n",
    ),
    "layer-dtype-checked-under-autocast": (
        f"{LAYERS}/arguments.py",
        "and not autocasts(x)",
        "and True",
    ),
    "layer-weight-decay-pulls-at-A": (
        LAYER,
        "(A_log|dt_bias|",
        "(dt_bias|",
        "layers/test_parts.py",
    ),
    "layer-other-rows-unchecked": (
        f"{LAYERS}/arguments.py",
        "if state.rows is None and shape[0] != rows:",
        "if False:",
        "layers/test_state.py",
    ),
}
