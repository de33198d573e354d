"""Gates, norms, positions, starts and what weight decay leaves alone."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from support.layer_cases import LAYER_CASES, hidden

from fastweights.checks import relative_error
from fastweights.layers import (
    MLSTM,
    Decay,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    HeadsConvolution,
    KimiDeltaAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    OutputNorm,
    ShortConvolution,
    SoftmaxAttention,
    TitansMemory,
    parameter_groups,
)
from fastweights.layers.common.rotary import rotary

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
LOOSE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float64: 1e-6}


def within(x, low, high, loose):
    assert low * (1 - loose) <= x.min() and x.max() <= high * (1 + loose)
    spread = x.max().log() - x.min().log()
    assert spread > 0.8 * math.log(high / low)  # and over all of it


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decay_starts_within_its_bounds(dtype):
    torch.manual_seed(0)
    decay, loose = Decay(2000, dtype=dtype), LOOSE[dtype]
    A, dt = decay.A_log.double().exp(), F.softplus(decay.dt_bias.double())
    within(A, 1, 16, loose)
    within(dt, 1e-3, 0.1, loose)
    assert abs(A.mean() - 8.5) < 0.3  # uniform, not log-uniform
    assert abs(dt.log().mean() - math.log(1e-2)) < 0.1
    g = decay(torch.zeros(1, 1, 2000, dtype=dtype))
    assert g.dtype == torch.promote_types(dtype, torch.float32)
    half_life = math.log(2) / -g
    assert half_life.isfinite().all()
    assert 0.4 < half_life.min() < 0.7 and 400 < half_life.max() < 720
    assert 5 < half_life.median() < 12


def test_drawn_in_fp32_whatever_the_dtype():
    """256 steps, as a draw in bf16 has, would put 1 in 256 at the bound."""
    torch.manual_seed(0)
    decay = Decay(20_000, A_range=(1e-4, 16.0), dtype=torch.bfloat16)
    slowest = (decay.A_log.double().exp() < 0.01).double().mean()
    assert 0 < slowest < 2 * 0.01 / 16


def test_bounds_that_are_given():
    torch.manual_seed(0)
    options = {"A_range": (0.01, 0.5), "dt_range": (2e-3, 2e-2)}
    for layer in (
        GatedDeltaNet(4, 400, 1, **options),
        KimiDeltaAttention(4, 400, 1, **options),
        Mamba2(400, head_dim=2, state_size=1, **options),
    ):
        within(layer.decay.A_log.exp(), 0.01, 0.5, 1e-3)
        within(F.softplus(layer.decay.dt_bias), 2e-3, 2e-2, 1e-3)


def test_safe_gate_starts_slow():
    torch.manual_seed(0)
    g = Decay(2, 1000, lower_bound=-5.0)(torch.zeros(1, 1, 2000))
    assert g.shape == (1, 1, 2, 1000)
    half_life = math.log(2) / -g
    assert 1.4 < half_life.min() < 1.6 and 120 < half_life.max() < 140


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mamba_starts(dtype):
    torch.manual_seed(0)
    layer = Mamba(500, state_size=5, dtype=dtype)
    A, loose = layer.A_log.double().exp(), LOOSE[dtype]
    want = torch.arange(1, 6, dtype=torch.float64).expand(1000, 5)
    torch.testing.assert_close(A, want, rtol=loose, atol=0)
    within(F.softplus(layer.dt_bias.double()), 1e-3, 0.1, loose)
    assert (layer.D == 1).all() and layer.dt_proj.in_features == 32
    bound = 32**-0.5
    assert 0.9 * bound < layer.dt_proj.weight.abs().max() <= bound * 1.01


def test_other_starts():
    layer = MLSTM(16, 4)
    write, forget = layer.gates.bias.chunk(2)
    assert (layer.gates.weight == 0).all() and (write == -10).all()
    assert forget.tolist() == [3, 4, 5, 6]
    layer = GatedLinearAttention(64, 2)
    assert (layer.f_proj[1].bias == 0).all()
    assert 0.957 < torch.sigmoid(torch.zeros(())) ** (1 / 16) < 0.958
    assert (Mamba2(64).D == 1).all()
    taps = ShortConvolution(1000, 4, bias=True)
    for x in (taps.weight, taps.bias):
        assert 0.49 < x.abs().max() <= 0.5
    for make in LAYER_CASES.values():
        for name, p in make().named_parameters():
            if "norm" in name:
                assert (p == (0 if name.endswith("bias") else 1)).all(), name


def test_sizes_as_published():
    """Parameters of the default sizes, from the papers' own counts."""

    def size(layer):
        return sum(p.numel() for p in layer.parameters())

    meta = {"device": torch.device("meta")}
    D = 2048
    gdn = size(GatedDeltaNet(D, 6, 256, expand_v=2, **meta))
    assert gdn == 6 * D**2 + 2 * D * 6 + 4 * (4 * 6 * 256) + 12 + 512
    qwen = size(GatedDeltaNet(D, 16, 128, num_v_heads=32, **meta))
    assert abs(qwen / 33.6e6 - 1) < 0.01
    assert size(DeltaNet(D, 16, **meta)) == 4 * D**2 + D * 16 + 12 * D + 128
    gla = size(GatedLinearAttention(D, 4, **meta))
    assert abs(gla - (4 * D**2 + 24.5 * D)) <= D
    kda = size(KimiDeltaAttention(2304, 32, 128, **meta))
    assert abs(kda / (4 * 2304 * 4096 + 256 * (2304 + 4096)) - 1) < 0.01
    mamba2 = size(Mamba2(D, **meta))
    assert abs(mamba2 / (6 * D**2 + 2 * D * 128 + D * 64) - 1) < 0.01
    assert abs(size(MLSTM(D, 4, **meta)) / (4 * D**2) - 1) < 0.01


@pytest.mark.parametrize("name", LAYER_CASES)
def test_weight_decay_spares_gates_norms_and_biases(name):
    """In a copy of the model too, and each parameter is in one group."""
    model = torch.nn.Sequential(copy.deepcopy(LAYER_CASES[name]()))
    frozen = model[0].o_proj.weight.requires_grad_(False)
    names = {id(p): key for key, p in model.named_parameters()}
    decayed, spared = (
        {names[id(p)] for p in group["params"]}
        for group in parameter_groups(model, 0.1)
    )
    assert not decayed & spared
    assert decayed | spared | {names[id(frozen)]} == set(names.values())
    kinds = ("A_log", "dt_bias", "D", "bias", "norm.weight", "norm_weight")
    kinds += (
        "step_offset",
        "lam",
        "b1",
        "b2",
        "norm_bias",
        "qk_scale",
        "qk_offset",
    )
    kinds += (".d",)  # Comba's
    assert spared == {key for key in decayed | spared if key.endswith(kinds)}
    model[0].o_proj.weight.requires_grad_(True)
    torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)
    groups = parameter_groups(model, 0.1)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    marked = dict(LAYER_CASES[name]().named_parameters(prefix="0"))
    marked = {k for k, p in marked.items() if hasattr(p, "_no_weight_decay")}
    assert marked == spared


def test_weight_decay_spares_the_biases_of_a_deep_memory():
    layer = TitansMemory(16, 1, depth=11)
    decayed, _ = parameter_groups(layer, 0.1)
    b = {id(p) for name, p in layer.start.named_parameters() if name[0] == "b"}
    assert len(b) == 11 and not b & {id(p) for p in decayed["params"]}


def test_a_and_dt_start_no_smaller_than_a_bound():
    """A of 0 has no logarithm and would never learn."""
    decay = Decay(3, 2, A_range=(0, 1e-9), dt_range=(1e-9, 1e-8)).double()
    torch.testing.assert_close(
        decay.A_log.exp(), torch.full((3,), 1e-4).double()
    )
    least = torch.full((1, 1, 3, 2), -1e-8).double()
    torch.testing.assert_close(
        decay(torch.zeros(1, 1, 6).double()), least, rtol=1e-3, atol=0
    )
    decay = Decay(1000, A_range=(0, 16))
    assert decay.A_log.exp().amax() < 16 and decay.A_log.exp().mean() < 9
    layer = Mamba(8, dt_range=(1e-9, 1e-8))
    step = F.softplus(layer.dt_bias)
    torch.testing.assert_close(
        step, torch.full((16,), 1e-4), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("name", LAYER_CASES)
def test_each_module_draws_its_own_parameters(name):
    """As FSDP does with a layer on meta, a module at a time."""
    layer = LAYER_CASES[name](device=torch.device("meta")).to_empty(
        device="cpu"
    )
    for p in layer.parameters():
        torch.nn.init.constant_(p, float("nan"))
    for module in layer.modules():
        if [*module.parameters(recurse=False)]:
            module.reset_parameters()
    assert all(p.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", LAYER_CASES)
def test_a_layer_tells_the_size_of_its_state(name):
    layer = LAYER_CASES[name]()
    for T in (1, 7):
        with torch.no_grad():
            _, state = layer(torch.randn(1, T, 8))
        assert layer.state_bytes(T) == state.nbytes


def test_a_state_that_grows_is_not_written_out():
    """2^40 tokens have keys and values of 64 bytes each, and a position."""
    layer = SoftmaxAttention(8, 2)
    assert layer.state_bytes(2**40) == 64 * 2**40 + 8
    assert layer.double().state_bytes(2**40) == 128 * 2**40 + 8


def test_output_norm():
    o = torch.randn(2, 3, 2, 5, dtype=torch.float64)
    gate = torch.randn(2, 3, 10, dtype=torch.float64)
    weight = torch.randn(10, dtype=torch.float64)
    for center in (False, True):
        for heads in (1, 2):
            for activation, function in (
                ("silu", F.silu),
                ("sigmoid", torch.sigmoid),
            ):
                norm = OutputNorm(
                    5, activation, num_heads=heads, center=center
                ).double()
                norm.weight.data = weight[: 5 * heads]
                x = o - o.mean(-1, keepdim=True) if center else o
                want = F.rms_norm(x, (5,), eps=1e-5)
                want = want.flatten(-2) * norm.weight.repeat(2 // heads)
                torch.testing.assert_close(norm(o), want)
                torch.testing.assert_close(
                    norm(o, gate), want * function(gate)
                )
    half = OutputNorm(5)(o.bfloat16(), gate.bfloat16())
    assert half.dtype == torch.bfloat16


def test_rotary_turns_by_differences():
    """A product of two turned vectors knows only how far apart they are."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 7, dtype=torch.float64)

    def product(a, b, **options):
        at = (torch.tensor([[t]]) for t in (a, b))
        q_, k_ = (
            rotary(x, t, **options) for x, t in zip((q, k), at, strict=True)
        )
        return (q_ * k_).sum()

    for options in ({}, {"fraction": 0.6}, {"theta": 10.0}):
        torch.testing.assert_close(
            product(5, 3, **options), product(1005, 1003, **options)
        )
        assert (product(5, 3, **options) - product(5, 4, **options)).abs() > 0
    turned = rotary(q, torch.tensor([[3]]), fraction=0.6)
    assert torch.equal(turned[..., 4:], q[..., 4:])
    assert not (turned[..., :4] == q[..., :4]).any()
    alone = rotary(q[..., :4], torch.tensor([[3]]))  # as if it were a head
    torch.testing.assert_close(turned[..., :4], alone)
    far = torch.tensor([[100_000]])
    low = rotary(q.bfloat16(), far)
    assert low.dtype == torch.bfloat16
    assert relative_error(low, rotary(q, far)) < 0.02


def test_three_convolutions_are_one():
    """As flash-linear-attention has them, one for each of q, k and v."""
    torch.manual_seed(0)
    one = HeadsConvolution((2, 2), (3, 5), 4, qk_l2norm=False)
    x = torch.randn(2, 9, 22)
    q, k, v, _ = one(x)
    parts = one.short_convolution.weight.split([6, 6, 10])
    for c, weight, got in zip(
        x.split([6, 6, 10], -1), parts, (q, k, v), strict=True
    ):
        three = torch.nn.Conv1d(
            len(weight),
            len(weight),
            4,
            groups=len(weight),
            padding=3,
            bias=False,
        )
        three.weight.data = weight[:, None].detach()
        want = F.silu(three(c.mT)[..., :9].mT)
        torch.testing.assert_close(got.flatten(2), want)


def test_lightning_as_transformers_and_as_minimax():
    """At a power of two they agree; else transformers has other slopes."""
    for heads, assert_same in ((4, True), (3, False)):
        layer = LightningAttention(8, heads, 2, layer=1, num_layers=4).double()
        x = hidden(1, 5, dtype=torch.float64)
        y, _ = layer(x)
        slopes = 2 ** (-8 * torch.arange(1.0, heads + 1).double() / heads)
        slopes = slopes * (1 - 1 / (3 + 1e-5) + 1e-5)
        qkv = F.silu(layer.qkv_proj(x)).unflatten(-1, (3, heads, 2))
        q, k, v = qkv.unbind(2)
        t = torch.arange(5.0)
        apart = (t[:, None] - t).masked_fill(t[:, None] < t, torch.inf)
        weights = (-slopes[:, None, None] * apart).exp()
        scores = torch.einsum("bthd,bshd->bhts", q, k) * weights
        o = torch.einsum("bhts,bshd->bthd", scores, v).flatten(2)
        o = F.rms_norm(o, (2 * heads,), eps=1e-6)
        want = layer.o_proj(o * layer.gate_proj(x).sigmoid())
        assert (relative_error(y, want) < 1e-4) == assert_same


@pytest.mark.parametrize("name", LAYER_CASES)
def test_made_on_a_device_in_a_dtype(name):
    for p in LAYER_CASES[name](dtype=torch.bfloat16).parameters():
        assert p.dtype == torch.bfloat16 and p.isfinite().all()
    for p in LAYER_CASES[name](device=torch.device("meta")).parameters():
        assert p.is_meta
