"""In mLSTM, the normaliser, feature maps and default numbers."""

from faults.family import ARGUMENTS, FAMILY, MAPS

MLSTM, NORMALISER = "fastweights/ops/mlstm.py", "fastweights/ops/normaliser.py"
TESTS = {MLSTM: "ops/test_mlstm.py", NORMALISER: "kernels/test_normaliser.py"}
MUTANTS = {
    "mlstm-empty-sequence-loses-its-m": (
        MLSTM,
        "torch.where(some, last, first.to(dtype))",
        "last",
    ),
    "mlstm-drops-eps": (
        MLSTM,
        "(torch.maximum(z.abs(), least) + eps)",
        "torch.maximum(z.abs(), least)",
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
        "weight, (-after).exp()",
        "weight, after.exp()",
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
        "decay.masked_fill(empty, of_empty)",
        "decay",
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
        "ops/test_mlstm.py",
    ),
    "normaliser-rounds-in-pytorch": (
        NORMALISER,
        "torch.cat([v.to(one.dtype), one], -1)",
        "torch.cat([v.to(one.dtype), one.to(q.dtype).to(one.dtype)], -1)",
        "ops/test_mlstm.py",
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
        "ops/test_mlstm.py",
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
        '"> 0": x > 0',
        '"> 0": x >= 0',
        "ops/test_family.py",
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
