"""In the short convolution: its arguments, its operator, its kernels."""

CONVOLUTION, SHIFTS, WALKS, WALKS_BACK = (
    f"{file}.py"
    for file in (
        "fastweights/ops/convolution",
        "fastweights/reference/convolution",
        "fastweights/kernels/convolution_forward",
        "fastweights/kernels/convolution_backward",
    )
)
TESTS = {
    CONVOLUTION: "ops/test_convolution.py",
    SHIFTS: "ops/test_convolution.py",
    WALKS: "kernels/test_convolution.py",
    WALKS_BACK: "kernels/test_convolution.py",
}
MUTANTS = {
    "convolution-norm-without-being-asked": (
        CONVOLUTION,
        "float(eps) if normalize else None",
        "float(eps)",
    ),
    "convolution-last-inputs-have-no-gradient": (
        CONVOLUTION,
        "(*outputs, dstate))",
        "(*outputs, None))",
    ),
    "convolution-rounds-under-autocast": (
        CONVOLUTION,
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
        WALKS_BACK,
        "b_dy = b_r * (b_dy - b_r * b_r * b_yd * b_y)",
        "b_dy = b_r * (b_dy - b_yd * b_y)",
    ),
    "kernel-convolution-blocks-leave-gaps": (
        WALKS,
        "o_y = (i_d - 2 * H) * BV",
        "o_y = (i_d - 2 * H) * BV * 2",
    ),
    "kernel-convolution-walk-begins-with-the-stretch": (
        WALKS_BACK,
        "left = tl.minimum(end - s, 4).to(tl.int32)",
        "left = tl.minimum(end - s, 0).to(tl.int32)",
    ),
    "kernel-convolution-reads-past-the-sequence": (
        WALKS_BACK,
        "left = tl.minimum(end - s, 4).to(tl.int32)",
        "left = 4",
    ),
    "kernel-convolution-last-group-is-whole": (
        WALKS_BACK,
        "left = length - 4 * groups + 4",
        "left = 4",
    ),
    "kernel-convolution-empty-stretch-has-a-group": (
        WALKS_BACK,
        "left = tl.where(groups > 0, left, 0)",
        "left = tl.where(groups > -1, left, 0)",
    ),
    "kernel-convolution-later-tokens-stay": (
        WALKS_BACK,
        "d_8, d_9, d_10 = d_4, d_5, d_6",
        "d_8, d_9, d_10 = d_5, d_6, d_7",
    ),
    "kernel-convolution-walk-back-sees-the-sequence-before": (
        WALKS_BACK,
        "m = (left >= 0) | ((left == -1) & (t > start))",
        "m = left >= -1",
    ),
    "kernel-convolution-walk-back-forgets-the-stretch-before": (
        WALKS_BACK,
        "m = (left >= 0) | ((left == -1) & (t > start))",
        "m = left >= 0",
    ),
    "kernel-convolution-each-stretch-begins-with-the-state": (
        WALKS_BACK,
        "m = (left == -1) & (t == start)",
        "m = left == -1",
    ),
    "kernel-convolution-each-stretch-has-the-state": (
        WALKS_BACK,
        "m_s = mask_if(t == start, m_d)",
        "m_s = m_d",
    ),
    "kernel-convolution-blocks-are-whole": (
        WALKS_BACK,
        "m_d = (o_b < D) & (o_y < R)",
        "m_d = o_b < D",
    ),
    "kernel-convolution-tap-counts-three": (
        WALKS_BACK,
        "    b_g += d_4 * b_4\n",
        "",
    ),
}
