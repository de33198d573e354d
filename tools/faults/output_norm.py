"""In the output norm: its kernels, and how they are called."""

NORM, KERNELS = (
    f"{file}.py"
    for file in (
        "fastweights/ops/output_norm",
        "fastweights/kernels/output_norm",
    )
)
TESTS = {
    NORM: "ops/test_output_norm.py",
    KERNELS: "kernels/test_output_norm.py",
}
MUTANTS = {
    "norm-eps-outside-of-the-root": (
        NORM,
        "keepdim=True) + eps).rsqrt()",
        "keepdim=True)).rsqrt() + eps",
    ),
    "kernel-norm-divides-by-the-tile": (
        KERNELS,
        "keep_dims=True) / V + eps",
        "keep_dims=True) / b_o.shape[1] + eps",
    ),
    "kernel-norm-scales-only": (
        KERNELS,
        "b_r * (b_dy - b_m * b_y)",
        "b_r * b_dy",
    ),
    "kernel-norm-gate-without-its-stride": (
        KERNELS,
        "stride = gate.stride(0)",
        "stride = gate.shape[1]",
    ),
    "kernel-norm-share-of-the-last-tile": (
        KERNELS,
        "b_dw += b_dy * b_y",
        "b_dw = b_dy * b_y",
    ),
    "kernel-norm-masked-rows-divide-by-nothing": (
        KERNELS,
        "tl.where(mask, b_s, 1.0)",
        "b_s",
    ),
}
