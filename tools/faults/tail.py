"""In what comes of tokens after the last sequence of a pack."""

FILES = {
    name: f"fastweights/{name}.py"
    for name in (
        "deep/mesa",
        "ops/family",
        "kernels/convolution",
        "kernels/family/stages",
        "kernels/selective",
        "kernels/tail",
        "layers/rows",
        "ops/mlstm",
        "models/loss",
        "reference/backend",
        "reference/convolution",
        "reference/selective",
        "ops/selective",
    )
}
PYTORCH, KERNELS = "ops/test_tail.py", "kernels/test_tail.py"
TESTS = {FILES["kernels/tail"]: KERNELS}
MUTANTS = {
    "tail-outputs-as-they-were": (
        FILES["reference/backend"],
        "for x in (o, *saved):",
        "for x in saved:",
        PYTORCH,
    ),
    "tail-gradients-as-they-were": (
        FILES["reference/backend"],
        "torch.empty_like if cu_seqlens is None else torch.zeros_like",
        "torch.empty_like",
        PYTORCH,
    ),
    "tail-convolution-reads-it": (
        FILES["reference/convolution"],
        ".masked_fill_(where.no_tokens, 0)",
        "",
        PYTORCH,
    ),
    "tail-convolution-learns-of-it": (
        FILES["reference/convolution"],
        "own = dz[0].masked_fill(where.no_tokens, 0)",
        "own = dz[0]",
        PYTORCH,
    ),
    "tail-selective-gate": (
        FILES["ops/selective"],
        "z = None if z is None else z.masked_fill(after, 0)",
        "pass",
        PYTORCH,
    ),
    "tail-mlstm-gates": (
        FILES["ops/mlstm"],
        "g, i = g.masked_fill(after, 0), i.masked_fill(after, 0)",
        "pass",
        PYTORCH,
    ),
    "tail-divided-by-nothing": (
        FILES["ops/family"],
        "z = z.masked_fill(outside(offsets, q.shape[1])[:, None, None], 1)",
        "pass",
        PYTORCH,
    ),
    "tail-is-the-last-rows": (
        FILES["layers/rows"],
        "self.place = self.place.masked_fill(self.row == N, 0)",
        "pass",
        PYTORCH,
    ),
    "rows-filled-up-to-the-longest": (
        FILES["layers/rows"],
        "if longest * len(spans) <= 2 * whole:",
        "if True:",
        "deep/test_lengths.py",
    ),
    "rows-states-in-order-of-length": (
        FILES["layers/rows"],
        "order = ns.argsort()",
        "order = ns",
        "deep/test_lengths.py",
    ),
    "tail-has-targets": (
        FILES["models/loss"],
        "outside(cu_seqlens, tokens.shape[1]), ignore_index",
        "outside(cu_seqlens + 9, tokens.shape[1]), ignore_index",
        PYTORCH,
    ),
    "tail-of-kernels-left": (
        FILES["kernels/family/stages"],
        "        if offsets:",
        "        if None:",
        KERNELS,
    ),
    "tail-of-kernels-a-row-late": (
        FILES["kernels/tail"],
        "m_t = (o_t >= end) & (o_t < T)",
        "m_t = (o_t > end) & (o_t < T)",
        KERNELS,
    ),
    "tail-of-kernels-first-columns": (
        FILES["kernels/tail"],
        "for c in range(0, WIDTHS[i], COLUMNS):",
        "for c in range(0, 1, COLUMNS):",
        KERNELS,
    ),
    "tail-of-convolution-kernel-left": (
        FILES["kernels/convolution"],
        "    clear_tail(cu_seqlens, dx)\n",
        "",
        KERNELS,
    ),
    "tail-of-selective-shares-left": (
        FILES["kernels/selective"],
        "clear_tail(cu_seqlens, dx, ddt, *dB, *dC)",
        "clear_tail(cu_seqlens, dx, ddt)",
        KERNELS,
    ),
}
