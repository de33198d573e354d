"""In projections of one input, and in how a layer's time is told apart."""

PROJECTIONS = "fastweights/ops/projections.py"
BENCH = "fastweights_lab/bench/layer.py"
TOUCHED = "models/test_touched.py"
TESTS = {
    PROJECTIONS: "ops/test_projections.py",
    BENCH: "lab/test_bench_layer.py",
}
MUTANTS = {
    "projections-forget-a-product": (
        PROJECTIONS,
        "zip(a[1:], b[1:], strict=True)",
        "zip(a[1:2], b[1:2], strict=True)",
    ),
    "projections-in-any-order": (
        PROJECTIONS,
        "pairs.sort(key=lambda pair: pair[1].shape[0])",
        "pairs.sort(key=lambda pair: -pair[1].shape[0])",
    ),
    "projections-pass-hooks-by": (
        PROJECTIONS,
        'or there["_forward_hooks"]',
        "or False",
    ),
    "projections-pass-other-classes-by": (
        PROJECTIONS,
        "return type(module) is kind[0] and not (",
        "return isinstance(module, kind[0]) and not (",
    ),
    "projections-pass-a-forward-by": (
        PROJECTIONS,
        'getattr(module.forward, "__func__", None) is not kind[1]',
        "False",
        TOUCHED,
    ),
    "projections-pass-global-hooks-by": (
        PROJECTIONS,
        "or private.hooked_globally()",
        "or False",
        TOUCHED,
    ),
    "projections-pass-renewed-weights-by": (
        PROJECTIONS,
        'or there["_forward_pre_hooks"]',
        "or False",
        TOUCHED,
    ),
    "projections-drop-a-bias": (
        PROJECTIONS,
        "and module.bias is None",
        "and True",
    ),
    "projections-leave-autocast-alone": (
        PROJECTIONS,
        "if torch.is_autocast_enabled(kind) and",
        "if False and",
    ),
    "projections-round-fp64-under-autocast": (
        PROJECTIONS,
        "and x.dtype != torch.float64",
        "and True",
    ),
    "projections-train-what-is-frozen": (
        PROJECTIONS,
        "if asked and g is not None",
        "if g is not None",
    ),
    "projections-count-half": (
        PROJECTIONS,
        "sum(2 * left[0]",
        "sum(left[0]",
    ),
    "projections-transforms-fail": (
        PROJECTIONS,
        "one_by_one |= private.transformed()",
        "one_by_one |= False",
    ),
    "projections-ask-the-dispatcher-while-compiling": (
        PROJECTIONS,
        "torch.compiler.is_compiling() or torch.is_grad_enabled()",
        "torch.is_grad_enabled()",
        "models/test_models.py::test_a_training_step_compiles",
    ),
    "bench-layer-splits-are-the-rest": (
        BENCH,
        "|cutlass|cublas)",
        "|cutlass)",
    ),
    "bench-layer-far-kernels-are-the-rest": (
        BENCH,
        "(intra|scan|gate|compose)_",
        "(intra|scan|compose)_",
    ),
}
