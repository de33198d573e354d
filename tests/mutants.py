"""Break the library one line at a time: the unit tests must notice.

    python tests/mutants.py [name ...]

Each mutant is one replacement in a copy of src; the tests named beside it
run against that copy. Prints which test caught it, and fails if one lives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
(
    STEPS,
    PARALLEL,
    CHUNKWISE,
    BACKWARD,
    BACKEND,
    ARGUMENTS,
    OPS,
    FAMILY,
    MAPS,
    TILE,
    INTRA,
    GRADIENTS,
    SCAN,
    COMPOSE,
    LAUNCH,
    DECODE,
    FLASH,
) = (
    f"fastweights/{file}.py"
    for file in (
        "reference/steps",
        "reference/parallel",
        "reference/chunkwise",
        "reference/chunkwise_backward",
        "reference/backend",
        "arguments",
        "ops",
        "family",
        "feature_maps",
        "kernels/tile",
        "kernels/intra",
        "kernels/intra_backward",
        "kernels/scan",
        "kernels/compose",
        "kernels/launch",
        "kernels/decode",
        "kernels/flash",
    )
)
TESTS = {
    STEPS: "reference/test_steps.py",
    PARALLEL: "reference/test_parallel.py",
    CHUNKWISE: "reference/test_chunkwise.py",
    BACKWARD: "reference/test_chunkwise_backward.py",
    BACKEND: "test_ops.py",
    ARGUMENTS: "test_ops.py",
    OPS: "test_ops.py",
    FAMILY: "test_family.py",
    MAPS: "test_feature_maps.py",
    TILE: "test_kernels_family.py",
    INTRA: "test_kernels_family.py",
    GRADIENTS: "test_kernels_family.py",
    SCAN: "test_kernels_family.py",
    COMPOSE: "test_kernels_family.py",
    LAUNCH: "test_kernels_family.py",
    DECODE: "test_kernels_decode.py",
    FLASH: "test_kernels_flash.py",
}

# name: file, the text to replace (its first occurrence), what replaces it,
# and a file of tests, if not the file's own
MUTANTS = {
    "outer-transposed-index": (
        STEPS,
        'einsum("...kv,...k->...v", S, q)',
        'einsum("...kv,...k->...v", S.mT.reshape(S.shape), q)',
    ),
    "linear-subtracts": (
        STEPS,
        "S = S + outer(k, v)",
        "S = S - outer(k, v)",
    ),
    "retention-grows": (
        STEPS,
        "S = g.exp()[..., None, None] * S + outer(k, v)",
        "S = (-g).exp()[..., None, None] * S + outer(k, v)",
    ),
    "mamba2-loses-its-step-size": (
        STEPS,
        "outer(k, dt[..., None] * v)",
        "outer(k, v)",
    ),
    "gla-gates-the-values": (
        STEPS,
        "S = g.exp()[..., :, None] * S + outer(k, v)",
        "S = S + outer(g.exp() * k, v)",
    ),
    "deltanet-adds-the-error": (
        STEPS,
        "(v - read(S, k)))",
        "(v + read(S, k)))",
    ),
    "gated-deltanet-corrects-first": (
        STEPS,
        "    S = g.exp()[..., None, None] * S\n"
        "    return deltanet(S, q, k, v, beta)",
        "    S, o = deltanet(S, q, k, v, beta)\n"
        "    return g.exp()[..., None, None] * S, o",
    ),
    "kda-drops-its-gate": (
        STEPS,
        "S = g.exp()[..., :, None] * S\n",
        "S = g.exp().mean(-1)[..., None, None] * S\n",
    ),
    "recurrence-forgets-twice": (
        STEPS,
        "        S = g.exp()[..., None] * S\n",
        "        S = (2 * g).exp()[..., None] * S\n",
    ),
    "softmax-step-grows-at-the-front": (
        STEPS,
        "torch.cat([cache[1], v[..., None, :]], dim=-2)",
        "torch.cat([v[..., None, :], cache[1]], dim=-2)",
    ),
    "mask-one-key-short": (
        PARALLEL,
        "return j <= i + (num_keys - num_queries)",
        "return j < i + (num_keys - num_queries)",
    ),
    "softmax-without-scale": (
        PARALLEL,
        'scores = scale * torch.einsum("bihk,bjhk->bhij", q, k)\n    if',
        'scores = torch.einsum("bihk,bjhk->bhij", q, k)\n    if',
    ),
    "online-forgets-to-rescale-the-sum": (
        PARALLEL,
        "total = rescale * total + p.sum(-1)",
        "total = total + p.sum(-1)",
    ),
    "decays-diagonal-with-a-gradient": (
        PARALLEL,
        "below = D.new_ones(C, C).tril_(-1)[..., None]",
        "below = D.new_ones(C, C).tril_()[..., None]",
    ),
    "scores-sign-of-the-exponent": (
        PARALLEL,
        "D = (G[..., :, None, :] - G[..., None, :, :])",
        "D = (G[..., None, :, :] - G[..., :, None, :])",
    ),
    "parallel-sums-over-queries": (
        PARALLEL,
        'torch.einsum("bhij,bjhv->bihv", A, v)',
        'torch.einsum("bhji,bjhv->bihv", A, v)',
    ),
    "gates-summed-without-their-own": (
        CHUNKWISE,
        "exact = running_sum(g)",
        "exact = running_sum(g) - g",
    ),
    "query-scores-lose-their-diagonal": (
        CHUNKWISE,
        "return G, decayed_scores(q, k, exact), None",
        "return G, decayed_scores(q, k, exact).tril(-1), None",
    ),
    "inverse-drops-beta": (
        CHUNKWISE,
        "unit_lower_inverse((beta * Akk).tril_(-1))",
        "unit_lower_inverse(Akk.tril(-1))",
    ),
    "inverse-wrong-neighbours": (
        CHUNKWISE,
        "joins = (row % 2 == 1) & (column == row - 1)",
        "joins = (row % 2 == 0) & (column == row - 1)",
    ),
    "scan-drops-beta": (
        CHUNKWISE,
        "P @ (beta * (v -",
        "P @ (1 * (v -",
    ),
    "scan-reads-undecayed-state": (
        CHUNKWISE,
        "o = decayed(q_n, G_n) @ S",
        "o = q_n @ S",
    ),
    "scan-drops-scale": (
        CHUNKWISE,
        "outputs.append(scale * o)",
        "outputs.append(o)",
    ),
    "sum-after-counts-its-own-gate": (
        CHUNKWISE,
        "F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip",
        "g.flip",
    ),
    "rest-as-a-difference": (
        CHUNKWISE,
        "rest = sum_after(g)",
        "rest = G[..., -1:, :] - G",
    ),
    "strip-starts-one-late": (
        CHUNKWISE,
        "(start - G[..., :s, :]).to",
        "(start - G[..., 1 : s + 1, :]).to",
    ),
    "reverse-cumsum-forward": (
        BACKWARD,
        "return x.flip(-2).cumsum(-2).flip(-2)",
        "return x.cumsum(-2)",
    ),
    "sum-before-counts-its-own": (
        BACKWARD,
        "F.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)",
        "x.cumsum(-2)",
    ),
    "backward-strip-starts-one-late": (
        BACKWARD,
        "(start - G[..., before, :]).to",
        "(start - G[..., 1 : s + 1, :]).to",
    ),
    "columns-undecayed-until-their-strip": (
        BACKWARD,
        "+= until * (A_before.mT",
        "+= (A_before.mT",
    ),
    "beta-row-forgotten": (
        BACKWARD,
        "dk_row = beta * answer",
        "dk_row = answer",
    ),
    "beta-column-forgotten": (
        BACKWARD,
        "[dAqk, dM], [q, beta * k]",
        "[dAqk, dM], [q, k]",
    ),
    "columns-gain-from-their-gate": (
        BACKWARD,
        "dk_row - dk_col\n",
        "dk_row + dk_col\n",
    ),
    "own-scores-counted-to-the-gate": (
        BACKWARD,
        "torch.stack(A).tril_(-1)",
        "torch.stack(A)",
    ),
    "state-gradient-without-the-rule": (
        BACKWARD,
        "dS = dS - decayed(k_n",
        "dS = dS + decayed(k_n",
    ),
    "state-gradient-decays-late": (
        BACKWARD,
        "dS = decayed(dS, total) +",
        "dS = dS +",
    ),
    "outputs-gradient-unscaled": (
        BACKWARD,
        "(q, k, v, scale * do)",
        "(q, k, v, do)",
    ),
    "inverse-gradient-sign": (
        BACKWARD,
        "dM = (-y @ v_new.mT)",
        "dM = (y @ v_new.mT)",
    ),
    "kept-state-has-no-gate": (
        BACKWARD,
        "            + per_gate(decayed(kept, G[..., -1:, :]), G)\n",
        "",
    ),
    "written-keys-in-the-reverse-sum": (
        BACKWARD,
        "reverse_cumsum(per_gate(change, G))\n"
        "            + sum_before(per_gate(k * dk_state, G))",
        "reverse_cumsum(per_gate(change - k * dk_state, G))\n"
        "            + per_gate((k * dk_state).sum(-2, keepdim=True), G)",
    ),
    "lone-chunk-forgets-beta": (
        BACKWARD,
        "v_new, y = P @ (beta * v), P.mT @ y",
        "v_new, y = P @ v, P.mT @ y",
    ),
    "heads-tiled-instead-of-repeated": (
        BACKEND,
        "x.repeat_interleave(groups, dim=2)",
        "x.repeat(1, 1, groups, 1)",
    ),
    "groups-round-before-they-sum": (
        BACKEND,
        "x.unflatten(2, (q.shape[2], -1)).sum(3) for",
        "x.to(q.dtype).unflatten(2, (q.shape[2], -1)).sum(3) for",
    ),
    "groups-summed-across": (
        BACKEND,
        "x.unflatten(2, (q.shape[2], -1)).sum(3)",
        "x.unflatten(2, (-1, q.shape[2])).sum(2)",
    ),
    "final-state-has-no-gradient": (
        BACKEND,
        "dS=None if dstate is None else dstate[n],",
        "dS=None,",
    ),
    "scale-not-the-root": (
        OPS,
        "scale = q.shape[-1] ** -0.5 if",
        "scale = q.shape[-1] ** -1.0 if",
    ),
    "loop-drops-scale": (
        OPS,
        "tokens[0] = scale * tokens[0]",
        "tokens[0] = tokens[0]",
    ),
    "packed-starts-from-the-last-state": (
        OPS,
        "scan(recurrence, state[n], *",
        "scan(recurrence, state[:1], *",
    ),
    "autocast-reaches-the-products": (
        OPS,
        '    ran(f"{backend} forward")\n    with without_autocast(q):',
        '    ran(f"{backend} forward")\n    with torch.no_grad():',
    ),
    "autocast-reaches-the-backward": (
        OPS,
        '    ran(f"{backend} backward")\n    with without_autocast(q):',
        '    ran(f"{backend} backward")\n    with torch.no_grad():',
    ),
    "autocast-leaves-its-operands": (
        OPS,
        "x.to(dtype) if x.dtype in narrow else x",
        "x",
    ),
    "fixed-gate-rounds-before-it-sums": (
        OPS,
        "g.to(wide(q.dtype)).expand",
        "g.expand",
    ),
    "offsets-may-decrease": (
        ARGUMENTS,
        "increases = all(a <= b for",
        "increases = any(a <= b for",
    ),
    "normaliser-multiplies": (
        FAMILY,
        "(o / (z + eps))",
        "(o * (z + eps))",
    ),
    "retnet-one-head-late": (
        FAMILY,
        "torch.exp2(-5 - h)",
        "torch.exp2(-6 - h)",
    ),
    "fourier-shrinks": (
        MAPS,
        "size = (0.5 * x.square()",
        "size = (-0.5 * x.square()",
    ),
    "positive-without-the-norm": (
        MAPS,
        "(x @ w.T - size).exp()",
        "(x @ w.T).exp()",
    ),
    "directions-of-length-one": (
        MAPS,
        "torch.cat(blocks)[:num_features] * lengths",
        "torch.cat(blocks)[:num_features]",
    ),
    "kernel-gate-grows-to-the-exit": (
        TILE,
        "b_out = b_total / b_in",
        "b_out = b_total * b_in",
    ),
    "kernel-inverse-adds": (
        TILE,
        "return b_R - add_product",
        "return b_R + add_product",
    ),
    "kernel-pairs-of-the-other-half": (
        TILE,
        "m_block & ((level == 0) | (m_own == 0))",
        "m_block & ((level == 0) | m_own)",
    ),
    "kernel-decays-untransposed": (
        TILE,
        "b_D = -b_D",
        "b_D = b_D",
    ),
    "kernel-inverse-in-fp16-always": (
        INTRA,
        "(steps < 2.05) & (largest < 1e3)",
        "(steps >= 0.0)",
    ),
    "kernel-scan-answers-with-the-wrong-sign": (
        SCAN,
        "b_e = b_v - b_e",
        "b_e = b_v + b_e",
    ),
    "kernel-scan-reads-as-at-the-exit": (
        SCAN,
        "tl.where(near, b_in / b_total, 1.0)",
        "tl.where(near, b_in, 1.0)",
    ),
    "kernel-scan-backward-adds-the-correction": (
        SCAN,
        "b_y = -b_y",
        "b_y = b_y",
    ),
    "kernel-dbeta-in-fp16": (
        SCAN,
        "b_dbeta = tl.sum(b_e * b_y",
        "b_dbeta = tl.sum(b_e + b_y",
    ),
    "kernel-segments-start-from-the-first": (
        SCAN,
        "m_first = mask_if(first == 0, m_S)",
        "m_first = m_S",
    ),
    "kernel-segments-end-in-each": (
        SCAN,
        "m_inner = mask_if(last < NT, m_S)",
        "m_inner = mask_if(last < 0, m_S)",
    ),
    "kernel-descriptor-goes-on-past-the-end": (
        TILE,
        "rows = (end - start).to(tl.int32)",
        "rows = (end - start).to(tl.int32) + BT",
    ),
    "kernel-descriptor-starts-with-the-first": (
        TILE,
        "p_x = x + start.to(tl.int64) * (H * D)",
        "p_x = x + 0 * start.to(tl.int64) * (H * D)",
    ),
    "kernel-maps-have-values": (
        SCAN,
        "c_v = tl.where(i_v < NV, c, (end - start).to(tl.int32))",
        "c_v = tl.where(i_v < NV, c, c)",
    ),
    "kernel-segments-are-not-composed": (
        LAUNCH,
        "if x.segments < 3:",
        "if x.segments < 9:",
    ),
    "kernel-segments-composed-forward-in-the-backward": (
        COMPOSE,
        "i_from = tl.where(stop == last, i_s, NS - 1)",
        "i_from = tl.where(stop == last, i_s - 1, NS - 1)",
    ),
    "kernel-second-piece-adds-what-is-there": (
        COMPOSE,
        "mask_if(start_of_segment, m_S) if BACK else m_S",
        "m_S if BACK else m_S",
    ),
    "kernel-first-range-is-mapped-again": (
        COMPOSE,
        "known = last == NT if BACK else c < span",
        "known = last == NT if BACK else c < size",
    ),
    "kernel-piece-goes-on-from-the-last": (
        SCAN,
        "if known == 0:",
        "if known != 0:",
    ),
    "kernel-maps-start-with-the-first-segment": (
        SCAN,
        "first = tl.maximum(first, tl.minimum(size, last))",
        "first = tl.maximum(first, tl.minimum(0, last))",
    ),
    "kernel-range-past-the-end": (
        SCAN,
        "tl.where(first < last, pieces, 0)",
        "tl.where(first <= last, pieces, 0)",
    ),
    "kernel-far-is-not-marked": (
        INTRA,
        "tl.where(is_near(tl.min(b_least), k, DG), 0, 1)",
        "tl.where(is_near(tl.min(b_least), k, DG), 0, 0)",
    ),
    "kernel-dk-of-the-correction": (
        GRADIENTS,
        "b_dk += b_err",
        "b_dk -= b_err",
    ),
    "kernel-columns-gain-from-the-gate": (
        GRADIENTS,
        "b_pairs = tl.fma(-b_k.to(tl.float32), b_c, b_pairs)",
        "b_pairs = tl.fma(b_k.to(tl.float32), b_c, b_pairs)",
    ),
    "kernel-far-columns-gain-from-the-gate": (
        GRADIENTS,
        "b_pairs -= b_kd * b_c",
        "b_pairs += b_kd * b_c",
    ),
    "kernel-near-is-not-divided": (
        GRADIENTS,
        "b_c *= b_undo * tl.exp2(b_G)",
        "b_c *= tl.exp2(b_G)",
    ),
    "kernel-dbeta-with-beta": (
        GRADIENTS,
        "tl.sum(b_own, axis=1) / nonzero(b_beta)",
        "tl.sum(b_own, axis=1) * nonzero(b_beta)",
    ),
    "kernel-gate-forgets-the-state": (
        GRADIENTS,
        "b_dg += tl.load(dkept + i_part)",
        "b_dg -= tl.load(dkept + i_part)",
    ),
    "kernel-decode-adds-the-answer": (
        DECODE,
        "(b_new - b_found)",
        "(b_new + b_found)",
    ),
}

# mLSTM, the normaliser, and what came with them.
MLSTM, NORMALISER = "fastweights/mlstm.py", "fastweights/normaliser.py"
TESTS |= {MLSTM: "test_mlstm.py", NORMALISER: "test_kernels_normaliser.py"}
MUTANTS |= {
    "mlstm-empty-sequence-loses-its-m": (
        MLSTM,
        "torch.where(some, last, first.to(dtype))",
        "last",
    ),
    "mlstm-drops-eps": (
        MLSTM,
        "(o / (total + eps))",
        "(o / total)",
    ),
    "mlstm-eps-of-another-size": (
        MLSTM,
        "eps: float = 1e-6",
        "eps: float = 1e-5",
    ),
    "mlstm-eps-unchecked": (
        MLSTM,
        'check_number("eps", eps, ">= 0")',
        "pass",
    ),
    "mlstm-decay-above-one": (
        MLSTM,
        "torch.minimum(before - after, -g)",
        "(before - after)",
    ),
    "mlstm-stabilizer-has-a-gradient": (
        MLSTM,
        "torch.minimum(before - after, -g).detach()",
        "torch.minimum(before - after, -g)",
    ),
    "mlstm-floor-in-other-units": (
        MLSTM,
        "least = (-after).exp()",
        "least = after.exp()",
    ),
    "mlstm-reset-is-infinite": (
        MLSTM,
        "masked_fill(g.isneginf() | emptied, CLEARS)",
        "masked_fill(emptied, CLEARS)",
    ),
    "mlstm-reset-to-nothing-is-none": (
        MLSTM,
        "masked_fill(g.isneginf() | emptied, CLEARS)",
        "masked_fill(g.isneginf() & ~emptied, CLEARS)",
    ),
    "mlstm-empty-state-is-cleared": (
        MLSTM,
        "rescaled.masked_fill(empty, 0)",
        "rescaled",
    ),
    "mlstm-masked-weight-is-nan": (
        MLSTM,
        "after.masked_fill(emptied, 0)",
        "after",
    ),
    "mlstm-empty-memory-counts": (
        MLSTM,
        "state = state.masked_fill(m.isneginf()[..., None, None], 0)",
        "pass",
    ),
    "mlstm-stretches-overlap": (
        MLSTM,
        "size *= 2",
        "size *= 3",
    ),
    "mlstm-nan-in-the-whole-pack": (
        MLSTM,
        "torch.fmax(a[:, here]",
        "torch.maximum(a[:, here]",
    ),
    "mlstm-memory-ignored-by-m": (
        MLSTM,
        "torch.where(starts, torch.fmax(g + entering, i), i)",
        "i",
    ),
    "mlstm-sequences-run-on": (
        MLSTM,
        "g.masked_fill(starts, -torch.inf)",
        "g",
    ),
    "mlstm-last-m-rounded-down": (
        MLSTM,
        "torch.where(last.double() < after, above, last)",
        "last",
    ),
    "mlstm-state-not-in-units-of-its-m": (
        MLSTM,
        "torch.where(ends, last.double(), after)",
        "after",
    ),
    "normaliser-under-autocast": (
        NORMALISER,
        "with without_autocast(q):",
        "with torch.enable_grad():",
        "test_mlstm.py",
    ),
    "normaliser-rounds-in-pytorch": (
        NORMALISER,
        "torch.cat([v.to(one.dtype), one], -1)",
        "torch.cat([v.to(one.dtype), one.to(q.dtype).to(one.dtype)], -1)",
        "test_mlstm.py",
    ),
    "normaliser-runs-narrow-on-the-kernels": (
        NORMALISER,
        "z, n = run(*full, one, n)",
        "z, n = run(q, k, one.to(q.dtype), n)",
    ),
    "normaliser-never-runs-apart": (
        NORMALISER,
        "if q.dtype == one.dtype or not kernels:",
        "if True:",
    ),
    "normaliser-starts-from-nothing": (
        NORMALISER,
        "z, n = run(*full, one, n)",
        "z, n = run(*full, one, None)",
    ),
    "normaliser-state-of-another-shape": (
        NORMALISER,
        "shapes = ((N, HV, q.shape[3], V + 1), (N, HV))",
        "shapes = ((N, HV, q.shape[3], V), (N, HV))",
        "test_mlstm.py",
    ),
    "linear-attention-eps-of-another-size": (
        FAMILY,
        "eps: float = 1e-6",
        "eps: float = 1e-5",
    ),
    "gated-retention-at-another-temperature": (
        FAMILY,
        "temperature: float = 16.0",
        "temperature: float = 8.0",
    ),
    "retention-decays-in-fp32": (
        FAMILY,
        "dtype = wide(q.dtype)",
        "dtype = torch.float32",
    ),
    "temperature-of-zero": (
        ARGUMENTS,
        'x > 0 if need == "> 0" else',
        "",
        "test_family.py",
    ),
    "elu1-without-its-clamp": (
        MAPS,
        "x.clamp(max=0).exp()",
        "x.exp()",
    ),
    "directions-stay-behind": (
        MAPS,
        'self.register_buffer("directions", directions)',
        "self.directions = directions",
    ),
    "directions-of-no-number": (
        MAPS,
        "if size < 1:",
        "if size < 0:",
    ),
    "features-of-another-width": (
        MAPS,
        "if x.dim() < 1 or x.shape[-1] != K:",
        "if x.dim() < 1:",
    ),
}

# The selective scan: its arguments, its operator, PyTorch's, the kernels.
SELECTIVE, OPERATOR, PREFIX, CHUNKS, TILES = (
    f"fastweights/{file}.py"
    for file in (
        "selective",
        "selective_operator",
        "reference/prefix",
        "reference/selective",
        "kernels/selective",
    )
)
TESTS |= {
    SELECTIVE: "test_selective.py",
    OPERATOR: "test_selective.py",
    PREFIX: "reference/test_prefix.py",
    CHUNKS: "test_selective.py",
    TILES: "test_kernels_selective.py",
}
MUTANTS |= {
    "selective-bias-in-half-precision": (
        SELECTIVE,
        "dt = dt.to(full) + dt_bias.to(full)",
        "dt = dt + dt_bias.to(dt.dtype)",
    ),
    "selective-softplus-in-half-precision": (
        SELECTIVE,
        "F.softplus(dt.to(full))",
        "F.softplus(dt.to(x.dtype))",
    ),
    "selective-gate-is-a-sigmoid": (
        SELECTIVE,
        "F.silu(z.to(full))",
        "F.sigmoid(z.to(full))",
    ),
    "selective-states-are-always-kept": (
        SELECTIVE,
        "keep = torch.is_grad_enabled() and any(",
        "keep = any(",
    ),
    "selective-loop-without-the-skip": (
        SELECTIVE,
        "y = y + D.to(full) * x.to(full)",
        "y = y + D.to(full)",
    ),
    "selective-loop-goes-on-from-the-first": (
        SELECTIVE,
        "torch.cat(states[s])",
        "torch.cat(states[: len(x)])",
    ),
    "selective-groups-that-do-not-divide": (
        SELECTIVE,
        "or G < 1 or channels % G",
        "or G < 1",
    ),
    "selective-last-state-has-no-gradient": (
        OPERATOR,
        "module.backward(dy, dstate, x, *others)",
        "module.backward(dy, None, x, *others)",
    ),
    "selective-transforms-pass": (
        SELECTIVE,
        "if not torch.compiler.is_compiling() and _transformed():",
        "if False:",
    ),
    "selective-one-tile-short": (
        OPERATOR,
        "T // length + cu_seqlens.shape[0] - 1",
        "T // length + cu_seqlens.shape[0] - 2",
    ),
    "selective-fake-states-of-a-batch": (
        OPERATOR,
        "x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1",
        "x.shape[0]",
    ),
    "selective-pairs-forget-the-first-decay": (
        PREFIX,
        "pairs = a[:, second] * a[:, before]",
        "pairs = a[:, second]",
    ),
    "selective-others-start-one-late": (
        PREFIX,
        "first = (L + 1) % 2 if reverse else 2",
        "first = (L + 1) % 2 if reverse else 4",
    ),
    "selective-starts-from-nothing": (
        CHUNKS,
        "    b[:, 0] = h\n",
        "    b[:, 0] = 0\n",
    ),
    "selective-last-gradient-is-lost": (
        CHUNKS,
        "dhs[:, -1] += dh",
        "dhs[:, -1] = dh",
    ),
    "selective-gradient-decays-early": (
        CHUNKS,
        "scan_by_pairs_(a[:, 2:], dhs",
        "scan_by_pairs_(a[:, 1:-1], dhs",
    ),
    "selective-gate-sees-the-undecayed": (
        CHUNKS,
        "dhs.mul_(a[:, 1:-1]).mul_",
        "dhs.mul_",
    ),
    "selective-rates-of-the-first-chunk": (
        CHUNKS,
        "dA += dA_t",
        "dA = dA_t",
    ),
    "selective-skip-of-the-first-chunk": (
        CHUNKS,
        "dD += (dy_t * x_t)",
        "dD = (dy_t * x_t)",
    ),
    "selective-sequences-share-a-place": (
        CHUNKS,
        "start // length + (n.start or 0)",
        "start // length",
    ),
    "selective-chunk-of-one-size": (
        CHUNKS,
        "return 64 if D * N <= 4096 else 16",
        "return 1024",
    ),
    "kernel-selective-tile-hands-on-its-first": (
        TILES,
        "b_h = row(b_hs, BT - 1)",
        "b_h = row(b_hs, 0)",
    ),
    "kernel-selective-groups-share-the-first": (
        TILES,
        "load_rows(B, o_t * G + i_g",
        "load_rows(B, o_t * G",
    ),
    "kernel-selective-groups-are-interleaved": (
        TILES,
        "i_d // NP * P + o_p, o_p < P",
        "i_d // NP + o_p * G, o_p < P",
    ),
    "kernel-selective-decays-into-the-next-sequence": (
        TILES,
        "m_next = (o_c + 1 < length)",
        "m_next = (o_c + 1 < T)",
    ),
    "kernel-selective-sequences-share-a-tile": (
        TILES,
        "start // BT + i_s",
        "start // BT",
    ),
    "kernel-selective-offsets-past-the-end": (
        TILES,
        "start = tl.minimum(tl.maximum(start, 0), T)",
        "start = tl.maximum(start, 0)",
    ),
    "kernel-selective-offsets-before-the-start": (
        TILES,
        "start = tl.minimum(tl.maximum(start, 0), T)",
        "start = tl.minimum(start, T)",
    ),
    "kernel-selective-sequence-past-the-end": (
        TILES,
        "stop = tl.minimum(tl.maximum(stop, start), T)",
        "stop = tl.maximum(stop, start)",
    ),
    "kernel-selective-shares-overlap": (
        TILES,
        "i_d.to(tl.int64) * rows + o_t",
        "i_d.to(tl.int64) * T + o_t",
    ),
    "kernel-selective-keeps-the-undecayed": (
        TILES,
        "b_kept = b_a * b_hs",
        "b_kept = b_hs",
    ),
    "kernel-selective-skip-has-no-gradient": (
        TILES,
        "b_dx += b_skip[None, :] * b_dy",
        "b_dx += 0 * b_dy",
    ),
    "kernel-selective-offsets-unchecked-on-the-host": (
        TILES,
        "    check_on_host(cu_seqlens, x.shape[1])\n",
        "",
    ),
}


def caught_by(file: str, old: str, new: str, tests: str = "") -> str:
    """The first test that fails on the mutant, or "" if none does."""
    with tempfile.TemporaryDirectory() as copy:
        src = Path(copy) / "src"
        shutil.copytree(ROOT / "src", src)
        text = (src / file).read_text()
        if old not in text:
            return f"STALE: {file} has no {old!r}"
        (src / file).write_text(text.replace(old, new, 1))
        tests = tests or TESTS[file]
        kernels = tests.startswith("test_kernels")
        settings = {"PYTHONPATH": str(src), "OMP_NUM_THREADS": "1"}
        settings |= {"TRITON_INTERPRET": "1"} if kernels else {}
        options = "-x -q --no-header --tb=no -rfE -p no:cacheprovider"
        command = [sys.executable, "-m", "pytest", *options.split()]
        run = subprocess.run(
            [*command, "-m", "not full", ROOT / "tests" / tests],
            cwd=copy,
            env=os.environ | settings,
            capture_output=True,
            text=True,
        )
    failed = ("FAILED", "ERROR")
    lines = [x for x in run.stdout.splitlines() if x.startswith(failed)]
    return lines[0].split(" - ")[0].split("/")[-1] if lines else ""


def main(names: list[str]) -> int:
    """Two at a time on two cores: each is a process of its own."""
    names = names or [*MUTANTS]
    passed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tests = pool.map(lambda name: caught_by(*MUTANTS[name]), names)
        for name, test in zip(names, tests, strict=True):
            print(f"{name:36} {test or 'ALIVE'}", flush=True)
            passed += bool(test) and not test.startswith("STALE")
    print(f"{passed} passed, {len(names) - passed} failed")
    return len(names) - passed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
