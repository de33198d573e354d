"""In the short convolution: its arguments, its operator, its kernels."""

CONVOLUTION, OPERATOR, SHIFTS, WALKS = (
    f"fastweights/{file}.py"
    for file in (
        "convolution",
        "convolution_operator",
        "reference/convolution",
        "kernels/convolution",
    )
)
TESTS = {
    CONVOLUTION: "test_convolution.py",
    OPERATOR: "test_convolution.py",
    SHIFTS: "test_convolution.py",
    WALKS: "test_kernels_convolution.py",
}
MUTANTS = {
    "convolution-norm-without-being-asked": (
        CONVOLUTION,
        "float(eps) if normalize else None",
        "float(eps)",
    ),
    "convolution-transforms-pass": (
        CONVOLUTION,
        "if private.transformed():",
        "if False:",
    ),
    "convolution-last-inputs-have-no-gradient": (
        OPERATOR,
        "(*outputs, dstate))",
        "(*outputs, None))",
    ),
    "convolution-rounds-under-autocast": (
        OPERATOR,
        "    with without_autocast(x):\n        return",
        "    if True:\n        return",
    ),
    "convolution-sequences-share-a-state": (
        SHIFTS,
        "return Places(t + (n + 1) * (W - 1)",
        "return Places(t + n * (W - 1)",
    ),
    "convolution-offsets-past-the-end": (
        SHIFTS,
        ".clamp(0, T).cummax(0)",
        ".cummax(0)",
    ),
    "convolution-eps-outside-of-the-root": (
        SHIFTS,
        ".add_(eps).rsqrt_()",
        ".rsqrt_().add_(eps)",
    ),
    "convolution-silus-gradient-is-a-sigmoid": (
        SHIFTS,
        "(1 - sigmoid).mul_(z).add_(1).mul_(sigmoid)",
        "sigmoid",
    ),
    "convolution-norm-scales-only": (
        SHIFTS,
        "along * scale**3",
        "0 * along",
    ),
    "kernel-convolution-group-forgets-the-last": (
        WALKS,
        "        b_1, b_2, b_3 = b_5, b_6, b_7\n    # Of an",
        "        b_1, b_2, b_3 = b_4, b_5, b_6\n    # Of an",
    ),
    "kernel-convolution-sequence-sees-the-one-before": (
        WALKS,
        "m_t = (t >= start) & (t < end)",
        "m_t = (t >= 0) & (t < end)",
    ),
    "kernel-convolution-reads-before-the-states": (
        WALKS,
        "m_s = (t < start) & (t + W > start)",
        "m_s = t < start",
    ),
    "kernel-convolution-empty-sequence-has-no-state": (
        WALKS,
        "((t < end) | (t == start))",
        "(t < end)",
    ),
    "kernel-convolution-keys-are-queries": (
        WALKS,
        "        if i_d >= H:\n            y = k\n",
        "        if i_d >= H:\n            y = q\n",
    ),
    "kernel-convolution-norm-forgets-the-length": (
        WALKS,
        "b_dy = b_r * (b_dy - b_r * b_r * b_yd * b_y)",
        "b_dy = b_r * (b_dy - b_yd * b_y)",
    ),
    "kernel-convolution-filter-counts-the-halo": (
        WALKS,
        "tl.where(s + 1 < stop, d_5, 0.0)",
        "d_5",
    ),
    "kernel-convolution-walk-ends-with-the-stretch": (
        WALKS,
        "(stop - t).to(tl.int32) + W - 1, 4)",
        "(stop - t).to(tl.int32), 4)",
    ),
    "kernel-convolution-each-stretch-has-the-state": (
        WALKS,
        "(s < t) & (t == start)",
        "(s < t)",
    ),
    "kernel-convolution-reads-past-the-sequence": (
        WALKS,
        "past = tl.minimum(stop + W - 1, end)",
        "past = stop + W - 1",
    ),
    "kernel-convolution-blocks-leave-gaps": (
        WALKS,
        "o_y = (i_d - 2 * H) * BV",
        "o_y = (i_d - 2 * H) * BV * 2",
    ),
}
