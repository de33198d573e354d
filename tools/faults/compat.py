"""Faults in what stands where others are expected: FLA, transformers."""

COMPAT = "fastweights/compat/__init__.py"
FLA = "fastweights/compat/fla.py"
CONVOLUTION = "fastweights/compat/causal_conv1d.py"
PACKED = "fastweights/compat/packed.py"
MAMBA = "fastweights/compat/mamba_ssm.py"
TRANSFORMERS = "fastweights/compat/transformers.py"
TESTS = {
    COMPAT: "compat/test_transformers.py",
    FLA: "compat/test_fla.py",
    CONVOLUTION: "compat/test_fla.py",
    PACKED: "compat/test_fla.py",
    MAMBA: "compat/test_mamba.py",
    TRANSFORMERS: "compat/test_transformers.py",
}
MUTANTS = {
    "fla-norm-eps": (FLA, "(rest + 1e-6)", "(rest + 1e-5)"),
    "fla-normalizer-eps": (FLA, "eps=1e-10", "eps=1e-6"),
    "fla-state-in-place": (FLA, "state = state.clone()", "state = state"),
    "fla-state-not-turned": (
        FLA,
        "state = state.mT.contiguous() if v_first else state\n",
        "state = state\n",
    ),
    "fla-beta-of-eigenvalues": (FLA, "2 * beta if x", "beta if x"),
    "fla-gate-without-bias": (FLA, "if bias is not None", "if False"),
    "fla-bound-without-rate": (FLA, "sigmoid(rate * g)", "sigmoid(g)"),
    "fla-ignores-what-it-lacks": (FLA, "got is not None and", "False and"),
    "fla-decodes-with-gradients": (
        FLA,
        "and not needs_gradient(*tokens, state)",
        "and True",
    ),
    "fla-two-decays": (
        FLA,
        '"g" in given and "g_gamma" in given,',
        "False,",
    ),
    "conv-cached-columns": (
        CONVOLUTION,
        "+ (T - cu_seq_lens_q[-1])",
        "+ 0 * T",
    ),
    "conv-documents-of-a-graph": (
        CONVOLUTION,
        "place, B * T).sort",
        "place, place).sort",
    ),
    "conv-rows-of-a-batch": (PACKED, "new[:, 1:] = ", "new[:] = True #"),
    "packed-old-documents": (
        PACKED,
        "version == seq_idx._version",
        "version is not None",
    ),
    "packed-states-of-rows": (PACKED, "cumsum(0) - 1", "cumsum(0) - 2"),
    "fla-decodes-packed": (
        FLA,
        "and offsets is None\n",
        "and True\n",
    ),
    "fla-documents-ignored": (PACKED, "or seq_idx is None", "or True"),
    "fla-narrow-keys": (
        FLA,
        "q.to(full), k.to(full)",
        "q.to(dtype), k.to(dtype)",
    ),
    "fla-states-after-chunks": (FLA, "initial_state=S, scale", "scale"),
    "fla-older-name-unheard": (
        FLA,
        ' or x.get("transpose_state_layout")',
        "",
    ),
    "fla-chunks-of-kda": (
        FLA,
        "CHUNK_SIZES[1:] if name",
        "CHUNK_SIZES if name",
    ),
    "fla-gate-of-any-rank": (
        FLA,
        "y.dim() != dims.get(name, y.dim())",
        "False",
    ),
    "conv-padding": (
        CONVOLUTION,
        "seq_idx[:, None] < 0",
        "seq_idx[:, None] < -9",
    ),
    "conv-wide-across-documents": (
        CONVOLUTION,
        "bias, before, cu_seqlens)\n        y =",
        "bias, before, None)\n        y =",
    ),
    "conv-state-kept": (CONVOLUTION, "conv_state.copy_(", "conv_state.clone("),
    "mamba-steps-unlimited": (MAMBA, "low > 0 or high < math.inf", "False"),
    "mamba-states-of-rows": (MAMBA, "state = state[-1:]", "state = state[:1]"),
    "mamba-state-kept": (MAMBA, "state.copy_(S)", "state.clone()"),
    "mamba-steps-not-shared": (
        MAMBA,
        "x.dim() == 3 and _expanded(A, 2) and _expanded(dt, 1)",
        "x.dim() == 3",
    ),
    "mamba-step-without-gradients": (
        MAMBA,
        "if gradient:\n            first",
        "if False:\n            first",
    ),
    "accelerate-packs-alone": (
        TRANSFORMERS,
        "if named.get(name) is not None:",
        "if False:",
    ),
    "accelerate-attention-unwarned": (
        TRANSFORMERS,
        "if packed and not",
        "if not",
    ),
    "accelerate-activation-lost": (
        TRANSFORMERS,
        "functions[activation](convolve(*given, **named))",
        "convolve(*given, **named)",
    ),
    "accelerate-lightning-padding": (
        TRANSFORMERS,
        "if attention_mask is not None:",
        "if False:",
    ),
    "accelerate-compiled-stays": (COMPAT, "private.forget_graphs()", "pass"),
    "accelerate-no-undo": (COMPAT, "setattr(owner, name, before)", "pass"),
    "accelerate-stays": (COMPAT, "sys.meta_path.remove(self)", "pass"),
    "accelerate-not-later": (
        COMPAT,
        "execute(module)\n            self._replace(module)",
        "execute(module)",
    ),
    "accelerate-twice": (COMPAT, "if _active is None:", "if True:"),
    "accelerate-exports": (COMPAT, "torch.compiler.is_exporting()", "False"),
    "accelerate-no-offsets": (
        COMPAT,
        "if name in names}",
        'if name in names - {"cu_seq_lens_q"}}',
    ),
    "accelerate-unchecked": (COMPAT, "!= arguments:", "== 0:"),
}
