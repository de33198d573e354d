"""In what is refused, in decoding, and in how kernels are called."""

from faults.family import (
    ARGUMENTS,
    CHUNKWISE,
    GATES,
    INTRA,
    OPS,
    STAGES,
    TILE,
)

(
    DECODING,
    FAST_WEIGHTS,
    PRIVATE,
    REGISTRATION,
    SCHEDULE,
    SETTINGS,
    KERNELS,
) = (
    f"{file}.py"
    for file in (
        "fastweights/serving",
        "fastweights/fast_weights",
        "fastweights/private",
        "fastweights/ops/registration",
        "fastweights/kernels/family/schedule",
        "fastweights/kernels/family/settings",
        "fastweights/kernels/__init__",
    )
)
TESTS = {
    DECODING: "test_decode_step.py",
    FAST_WEIGHTS: "test_fast_weights.py",
    PRIVATE: "ops/test_recurrence.py",
    REGISTRATION: "ops/test_recurrence.py",
    SCHEDULE: "kernels/test_schedule.py",
    SETTINGS: "kernels/test_family.py",
    KERNELS: "kernels/test_family.py",
}
MUTANTS = {
    "layouts-pass": (
        ARGUMENTS,
        "if x.layout != torch.strided:",
        "if False:",
    ),
    "states-of-other-dtypes-pass": (
        ARGUMENTS,
        "(states, (full, *besides)),",
        "(states, (full, torch.bfloat16)),",
    ),
    "states-of-fp64-are-in-fp32": (
        ARGUMENTS,
        "        full = narrow\n",
        "        pass\n",
    ),
    "calls-without-a-token-pass": (
        ARGUMENTS,
        "if B < 1 or T < 1 or H < 1 or K < 1:",
        "if B < 1 or H < 1 or K < 1:",
    ),
    "lengths-of-two-kinds-pass": (
        ARGUMENTS,
        "or v.shape[:2] != q.shape[:2]",
        "or v.shape[:1] != q.shape[:1]",
    ),
    "fixed-gate-goes-by-tokens": (
        OPS,
        "g.to(wide(q.dtype)).expand(v.shape[:3])",
        "g.to(wide(q.dtype))[:, None].expand(v.shape[:3])",
    ),
    "a-trace-misses-the-operator": (
        PRIVATE,
        "        or _is_tracing()  # type: ignore[misc]\n",
        "",
    ),
    "transforms-pass": (
        REGISTRATION,
        "if private.transformed():",
        "if False:",
    ),
    "transforms-pass-in-the-convolution": (
        REGISTRATION,
        "if private.transformed():",
        "if False:",
        "ops/test_convolution.py",
    ),
    "transforms-pass-in-the-selective-scan": (
        REGISTRATION,
        "if private.transformed():",
        "if False:",
        "ops/test_selective.py",
    ),
    "inference-tensors-pass": (
        REGISTRATION,
        "if x is not None and x.is_inference():",
        "if False:",
    ),
    "decays-are-zero-too-early": (
        CHUNKWISE,
        "CLEARS = -750.0",
        "CLEARS = -75.0",
    ),
    "decode-continues-from-nothing": (
        DECODING,
        "return advance(state, *x",
        "return advance(0 * state, *x",
    ),
    "decode-bf16-state-stays": (
        DECODING,
        "state.copy_(S)",
        "pass",
    ),
    "decode-fp64-takes-bf16-states": (
        DECODING,
        "return () if fp64 else NARROW",
        "return NARROW",
    ),
    "decode-rows-keep-their-state": (
        DECODING,
        "state.index_copy_(0, at, S.to(state.dtype))",
        "pass",
        "test_serving.py",
    ),
    "decode-rows-of-another-pool": (
        DECODING,
        "there = (at >= 0) & (at < state.shape[0])",
        "there = at >= 0",
        "test_serving.py",
    ),
    "kernel-decode-rows-are-the-batchs": (
        "fastweights/kernels/decode.py",
        "i_n = tl.load(rows + i_b).to(tl.int64)",
        "i_n = i_b + 0 * tl.load(rows + i_b).to(tl.int64)",
        "kernels/test_decode.py",
    ),
    "step-of-mlstm-keeps-its-m": (
        "fastweights/serving.py",
        "    put(m, last, rows)\n",
        "",
        "test_serving.py",
    ),
    "step-in-no-row-writes-the-first": (
        "fastweights/serving.py",
        "source = source.where(there, first)",
        "source = source",
        "test_serving.py",
    ),
    "decode-of-seventeen": (
        DECODING,
        "MAX_TOKENS = 16",
        "MAX_TOKENS = 17",
    ),
    "decode-lets-the-state-overlap": (
        DECODING,
        "reach = sum([(n - 1) * step for n, step in dims if step <= stride])",
        "reach = sum([(n - 1) * step for n, step in dims if step < stride])",
    ),
    "decode-where-a-gradient-is-needed": (
        DECODING,
        "torch.is_grad_enabled() and x.requires_grad",
        "torch.is_grad_enabled() and x.grad is not None",
    ),
    "decode-returns-what-no-graph-may-save": (
        DECODING,
        "return o if torch.is_inference_mode_enabled() else o.clone()",
        "return o",
    ),
    "inner-product-repels": (
        FAST_WEIGHTS,
        "return -(prediction * target).sum(-1)",
        "return (prediction * target).sum(-1)",
    ),
    "error-without-its-half": (
        FAST_WEIGHTS,
        ".square().sum(-1) / 2",
        ".square().sum(-1)",
    ),
    "descent-goes-up": (
        FAST_WEIGHTS,
        "return W - factor(rate, W) * dW",
        "return W + factor(rate, W) * dW",
    ),
    "decay-after-the-step": (
        FAST_WEIGHTS,
        "return sgd(tree_map(decay, params), gradient, memory, rate)",
        "params, memory = sgd(params, gradient, memory, rate)\n"
        "    return tree_map(decay, params), memory",
    ),
    "momentum-forgets": (
        FAST_WEIGHTS,
        "return factor(momentum, M) * M + factor(rate, M) * dW",
        "return factor(rate, M) * dW",
    ),
    "learner-reads-before-it-learns": (
        FAST_WEIGHTS,
        'o = model(params if read == "after" else state[0], q)',
        "o = model(state[0], q)",
    ),
    "values-are-not-looked-at": (
        ARGUMENTS,
        '(name, x.isnan(), "numbers")',
        '(name, x.isinf(), "numbers")',
        "test_values.py",
    ),
    "values-of-unit-keys-diverge": (
        ARGUMENTS,
        "most = 2 * (1 + 2 * torch",
        "most = 1 * (1 + 2 * torch",
        "test_values.py",
    ),
    "schedule-has-one-buffer-for-all": (
        SCHEDULE,
        "values += [theirs + place for place in kept[:-1]]",
        "values += [theirs for place in kept[:-1]]",
    ),
    "schedule-has-one-place-for-all-between": (
        SCHEDULE,
        "values += [ours + place for place in between[:-1]]",
        "values += [ours for place in between[:-1]]",
    ),
    "schedule-lends-no-memory-for-descriptors": (
        SCHEDULE,
        'getattr(x, "TMA", False)',
        'getattr(x, "TMA", 1) is None',
        "compile/test_launch.py",
    ),
    "schedule-takes-a-number-for-the-scale": (
        SCHEDULE,
        "order = [SCALE, *names",
        "order = [Count('T'), *names",
    ),
    "schedule-keeps-the-numbers-of-its-first-length": (
        SCHEDULE,
        "-(getattr(lengths, self.of) * -self.times // self.per)",
        "-(lengths.T * -self.times // self.per)",
    ),
    "schedule-has-one-program-too-few": (
        SCHEDULE,
        "-(getattr(lengths, self.of) * -self.times // self.per)",
        "getattr(lengths, self.of) * self.times // self.per",
        "compile/test_launch.py",
    ),
    "schedule-knows-no-later-length": (
        SCHEDULE,
        "= self.cached(lengths)",
        "= self.cached(lengths._replace(T=1))",
        "compile/test_launch.py",
    ),
    "a-length-is-a-kind": (
        "fastweights/kernels/family/backend.py",
        "rule = (gate, beta is not None, chunk_size, precision)",
        "rule = (gate, beta is not None, chunk_size + T % 2, precision)",
        "compile/test_launch.py",
    ),
    "lengths-of-packed-sequences-have-no-slot-more": (
        SETTINGS,
        "slots=chunks + N if packed",
        "slots=chunks if packed",
    ),
    "lengths-of-a-pack-have-a-border-at-its-end": (
        SETTINGS,
        "borders=(T - 1) // (L * C) if packed",
        "borders=T // (L * C) if packed",
    ),
    "backward-computes-no-row-again": (
        STAGES,
        "x.decayed, x.decays, (None, None), x.strong",
        "x.decayed, (None,) * 6, (None, None), x.strong",
    ),
    "first-pass-writes-outputs": (
        STAGES,
        "nothing = (x.Aqk, x.R), (None, None, None, None)",
        "nothing = (x.Aqk, x.R), (x.o, x.state, None, None)",
    ),
    "call-takes-a-gate-a-channel-for-one-a-head": (
        "fastweights/kernels/family/backend.py",
        "gate = 0 if g is None else 1 if g.dim() == 3 else int(K)",
        "gate = 0 if g is None else 1",
        "kernels/test_family.py",
    ),
    "gate-of-one-channel-has-a-gradient-per-head": (
        "fastweights/kernels/family/backend.py",
        'made["dg"] = made["dg"].view_as(g)',
        "pass",
        "kernels/test_family.py",
    ),
    "settings-of-a-gate-a-channel-by-key-heads": (
        SETTINGS,
        "H=kind.HV if kind.per_channel and not inside else kind.H",
        "H=kind.H",
    ),
    "settings-of-the-backward-compose-forward": (
        SETTINGS,
        'BACK=stage.endswith("backward")',
        "BACK=False",
    ),
    "precision-from-the-old-switch": (
        KERNELS,
        'return torch.backends.cuda.matmul.fp32_precision == "tf32"',
        'return torch.get_float32_matmul_precision() == "medium"',
    ),
    "precision-of-wide-keys-in-tf32": (
        KERNELS,
        "(K > 128 or not allows_tf32())",
        "not allows_tf32()",
    ),
    "kernel-believes-the-offsets": (
        TILE,
        "return tl.minimum(tl.maximum(t, 0), T)",
        "return t",
    ),
    "kernel-lets-a-gate-a-channel-overflow": (
        GATES,
        "b_g = clamped(b_g.to(tl.float32) * tile.LOG2_E, -30000.0)",
        "b_g = b_g.to(tl.float32) * tile.LOG2_E",
    ),
    "kernel-lets-a-gate-a-head-overflow": (
        INTRA,
        "b_g = gates.clamped(b_g.to(tl.float32), -20000.0)",
        "b_g = b_g.to(tl.float32)",
    ),
    "kernel-halves-too-far-in-fp16": (
        GATES,
        "b_total >= (-8.0 if fp16 else -160.0)",
        "b_total >= -160.0",
    ),
    "kernel-halves-whatever-the-decay": (
        GATES,
        "b_total >= (-8.0 if fp16 else -160.0)",
        "b_total >= (-8.0 if fp16 else -900.0)",
    ),
    "decode-goes-unseen": (
        DECODING,
        "torch.autograd.graph.increment_version(state)",
        "pass",
    ),
}
