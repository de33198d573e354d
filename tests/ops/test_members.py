"""Each member against its own step, and what it refuses."""

import inspect
import math
import pydoc
import re

import pytest
import torch
from support.inputs import member_inputs
from support.refused import refused

import fastweights as fw
from fastweights import feature_maps
from fastweights.checks import relative_error
from fastweights.ops.members import ARGUMENT_DOCS, shape_of
from fastweights.reference import steps

B, T, H, K, V = 2, 21, 2, 5, 4
MEMBERS = {
    "linear_attention": ("none", "additive", "linear"),
    "retention": ("fixed", "additive", "retention"),
    "mamba2": ("head", "additive", "retention"),
    "gla": ("channel", "additive", "gla"),
    "deltanet": ("none", "delta", "deltanet"),
    "gated_deltanet": ("head", "delta", "gated_deltanet"),
    "kda": ("channel", "delta", "kda"),
}


def inputs(name):
    gate, rule, _ = MEMBERS[name]
    return member_inputs(gate, rule, B=B, T=T, H=H, HV=H, K=K, V=V)


@pytest.mark.parametrize("backend", ["loop", "torch"])
@pytest.mark.parametrize("name", MEMBERS)
def test_member_is_its_step_in_a_loop(name, backend):
    x = inputs(name)
    tokens = [x["q"], x["k"], x["v"]]
    if "g" in x:
        g = x["g"]
        tokens.append(g.expand(B, T, H) if g.dim() == 1 else g)
    if "beta" in x:
        tokens.append(x["beta"])
    step = getattr(steps, MEMBERS[name][2])
    o, state = steps.scan(step, x["initial_state"], *tokens)
    got = getattr(fw, name)(**x, scale=0.3, backend=backend, chunk_size=16)
    torch.testing.assert_close(got, (0.3 * o, state))


OPTIONS = ("scale", "initial_state", "cu_seqlens", "chunk_size", "backend")
OTHERS = ("gated_retention", "gated_deltanet2", "comba")


@pytest.mark.parametrize("name", [*MEMBERS, *OTHERS])
def test_help_says_how_to_call_a_member(name):
    function = getattr(fw, name)
    text = inspect.getdoc(function)
    assert "as\n        :func:`fastweights.linear_recurrence`" in text
    given = inspect.signature(function).parameters
    gate = f"    g: {NEED.get(name)} natural log of the decay"
    assert (gate in text) == ("g" in given)
    args = text.partition("\nArgs:\n")[2].partition("\nReturns:\n")[0]
    described = re.findall(r"^    ((?:\w+, )*\w+): ", args, re.M)
    assert sorted(", ".join(described).split(", ")) == sorted(given)
    if name in ("gated_deltanet", "kda"):  # also where only source is read
        said = inspect.getdoc(inspect.unwrap(function))
        _, _, own = said.partition("Args:\n")
        shapes = {
            x: p.annotation for x, p in given.items() if x in ARGUMENT_DOCS
        }
        lines = [
            f"    {x}: {shape_of(p)}{ARGUMENT_DOCS[x]}"
            for x, p in shapes.items()
        ]
        assert own.splitlines() == lines
    assert "    scale: factor on o; K**-0.5 if None" in text
    scale = 1.0 if name == "mamba2" else None
    shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
    for name, shape in {"q": "B T H K", "v": "B T HV V"}.items():
        assert f"{name}: jaxtyping.Float[Tensor, '{shape}']" in shown
    assert f"scale: float | None = {scale}, initial_state: " in shown
    assert "options" not in inspect.signature(function).parameters
    margins = {len(x) - len(x.lstrip()) for x in text.splitlines()}
    assert margins <= {0, 4, 8}


@pytest.mark.parametrize("name", [*MEMBERS, *OTHERS])
def test_an_unknown_keyword_is_named_beside_the_members_own(name):
    """Before anything else is looked at, and never as linear_recurrence's."""
    function = getattr(fw, name)
    own = [*inspect.signature(function).parameters]
    assert {*OPTIONS} < {*own}
    x = torch.zeros(1, 1, 1, 1)
    for other in ("head_first", *({"g", "beta", "normalize"} - {*own})):
        with pytest.raises(TypeError) as error:
            function(x, x, x, **{other: x if other == "g" else True})
        given = "Tensor" if other == "g" else "True"
        assert str(error.value) == (
            f"{other}: got {given}, which {name} does not take, need one of "
            f"{', '.join(own)}"
        )


def test_mamba2_in_its_own_terms_and_with_its_own_scale():
    x = inputs("mamba2")
    dt = torch.rand(B, T, H, dtype=torch.float64)
    A = -torch.rand(H, dtype=torch.float64)
    ref = steps.scan(
        steps.mamba2,
        x["initial_state"],
        *(x["q"], x["k"], x["v"], dt, A.expand(B, T, H)),
    )
    got = fw.mamba2(
        x["q"],
        x["k"],
        dt[..., None] * x["v"],
        dt * A,
        initial_state=x["initial_state"],
    )
    torch.testing.assert_close(got, ref)


def test_retention_takes_retnets_decays_unless_given():
    x = inputs("retention")
    del x["g"]
    expected = [math.log(1 - 2 ** (-5 - h)) for h in range(8)]
    g = fw.retnet_log_decay(8)
    assert g.dtype == torch.float32
    torch.testing.assert_close(g, torch.tensor(expected))
    g = torch.tensor(expected[:H], dtype=torch.float64)  # as x is
    want = fw.retention(**x, g=g)
    torch.testing.assert_close(fw.retention(**x), want, rtol=1e-13, atol=0)
    x = {name: t.float() for name, t in x.items()}
    want = fw.retention(**x, g=fw.retnet_log_decay(H))
    torch.testing.assert_close(fw.retention(**x), want, rtol=0, atol=0)


def test_retention_takes_decays_in_fp32_beside_fp64():
    """A user's g may be narrower than q, as in every member."""
    x = inputs("retention")
    x["g"] = fw.retnet_log_decay(H)
    want = fw.retention(**(x | {"g": x["g"].double()}))
    torch.testing.assert_close(fw.retention(**x), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype, most",
    [(torch.float16, 20), (torch.bfloat16, 129), (torch.float32, 145)],
)
def test_no_head_of_retnet_keeps_everything(dtype, most):
    g = fw.retnet_log_decay(most, dtype=dtype)
    want = [math.log1p(-(2.0 ** (-5 - h))) for h in range(most)]
    assert (g < 0).all()
    assert g.equal(torch.tensor(want, dtype=torch.float64).to(dtype))
    said = f"num_heads: got {most + 1}, need at most {most} in {dtype}, "
    with pytest.raises(ValueError, match=re.escape(said)):
        fw.retnet_log_decay(most + 1, dtype=dtype)


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 64])
def test_lightning_log_decays_are_alibis_slopes_by_layer(heads):
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 / power * (h + 1)) for h in range(power)]
    slopes += [
        2.0 ** (-8.0 / (2 * power) * (2 * h + 1)) for h in range(heads - power)
    ]
    for layer, factor in ((0, 1 + 1e-5), (3, 0.5 + 1e-5), (6, 1e-5)):
        g = fw.lightning_log_decay(heads, layer, 7)
        assert g.dtype == torch.float32
        want = -factor * torch.tensor(slopes)
        torch.testing.assert_close(g, want)


@pytest.mark.parametrize("temperature", [16.0, 1.0])
def test_gated_retention_takes_a_root_of_a_sigmoid(temperature):
    x = inputs("mamba2")
    logits = torch.randn(B, T, H, dtype=torch.float64)
    x["g"] = torch.sigmoid(logits).pow(1 / temperature).log()
    want = fw.mamba2(**x, scale=None, backend="loop")
    del x["g"]
    got = fw.gated_retention(**x, logits=logits, temperature=temperature)
    torch.testing.assert_close(got, want)


def test_the_default_temperature_keeps_an_untrained_gate_near_one():
    x = inputs("mamba2")
    x["g"] = torch.full_like(x["g"], math.log(0.5) / 16)
    want = fw.mamba2(**x, scale=None)
    del x["g"]
    got = fw.gated_retention(**x, logits=torch.zeros(B, T, H).double())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gated_retention_takes_narrow_logits(dtype):
    x = {name: t.float() for name, t in inputs("mamba2").items()}
    del x["g"]
    logits = torch.randn(B, T, H).to(dtype)
    got = fw.gated_retention(**x, logits=logits)
    torch.testing.assert_close(
        got, fw.gated_retention(**x, logits=logits.float())
    )


def feature(name):
    if name == "positive":
        generator = torch.Generator().manual_seed(0)
        directions = feature_maps.random_directions(7, K, generator=generator)
        return feature_maps.PositiveRandom(directions)
    return getattr(feature_maps, name)


@pytest.mark.parametrize("eps", [1e-6, 0.5, 0])
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("name", ["elu1", "softmax", "positive"])
def test_normalised_linear_attention_is_a_weighted_mean(name, scale, eps):
    phi = feature(name)
    x = inputs("linear_attention")
    del x["initial_state"]
    q, k, v = phi(x["q"]), phi(x["k"]), x["v"]
    ref = torch.zeros_like(v)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for t in range(T):
        weights = factor * torch.einsum(
            "bhk,bjhk->bjh", q[:, t], k[:, : t + 1]
        )
        sums = (weights[..., None] * v[:, : t + 1]).sum(1)
        ref[:, t] = sums / (weights.sum(1)[..., None] + eps)
    o, state = fw.linear_attention(
        **x, feature_map=phi, normalize=True, scale=scale, eps=eps
    )
    torch.testing.assert_close(o, ref)
    torch.testing.assert_close(
        state,
        torch.cat(
            [torch.einsum("bjhk,bjhv->bhkv", k, v), k.sum(1)[..., None]], -1
        ),
    )


def test_the_default_eps_answers_a_query_that_matches_nothing():
    ones = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    x = {"q": ones, "k": 1e-6 * ones, "v": 2 * ones}
    o, _ = fw.linear_attention(**x, normalize=True)
    torch.testing.assert_close(o, ones)  # 2e-6 / (1e-6 + eps)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("phi", ["elu1", "identity"])
def test_the_normaliser_is_not_rounded_to_half_precision(phi, seed):
    """Features of both signs: a sum that cancels, and divides."""
    generator = torch.Generator().manual_seed(seed)
    x = [
        torch.randn(1, 80, 2, 16, generator=generator).bfloat16()
        for _ in range(4)
    ]
    *x, loss = (t.requires_grad_() for t in x)
    wide = [t.detach().double().requires_grad_() for t in x]
    results = []
    for q, k, v in (x, wide):
        if phi == "elu1":  # as rounded as the library's
            q, k = (
                feature_maps.elu1(t.bfloat16()).to(t.dtype) for t in (q, k)
            )
        o, _ = fw.linear_attention(q, k, v, normalize=True, eps=0.0)
        leaves = (q, k, v)
        results.append((o, *torch.autograd.grad((o * loss).sum(), leaves)))
    assert results[0][0].dtype == torch.bfloat16
    for found, want, budget in zip(
        *results, (3e-3, 6e-3, 6e-3, 6e-3), strict=True
    ):
        assert relative_error(found, want) < budget


def test_the_normaliser_may_be_larger_than_fp16s_numbers():
    q = torch.full((1, 8, 1, 64), 16.0).half()
    v = torch.full((1, 8, 1, 4), 0.25).half()
    o, state = fw.linear_attention(q, q, v, scale=1.0, normalize=True)
    assert o.equal(v)  # 8 tokens of 64 * 16^2: z is 131072
    assert state[0, 0, 0, 4] == 8 * 16


NEED = {
    "retention": "[HV]",
    "mamba2": "[B, T, HV]",
    "gla": "[B, T, HV, K]",
    "gated_deltanet": "[B, T, HV]",
    "kda": "[B, T, HV, K]",
    "gated_deltanet2": "[B, T, HV, K]",
    "comba": "[B, T, HV]",
}


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        (name, gate)
        for name in NEED
        for gate in ("fixed", "head", "channel")
        if name in MEMBERS and gate != MEMBERS[name][0]
    ],
)
def test_member_refuses_a_gate_of_another_width(name, gate):
    x = inputs(name)
    g = member_inputs(gate, "additive", B=B, T=T, H=H, HV=H, K=K)["g"]
    with pytest.raises(ValueError) as error:
        getattr(fw, name)(**(x | {"g": g}))
    assert (
        str(error.value) == f"g: got shape {list(g.shape)}, need {NEED[name]}"
    )


@pytest.mark.parametrize("name", ["mamba2", "gla", "gated_deltanet", "kda"])
def test_member_refuses_no_gate(name):
    with pytest.raises(TypeError, match="g: got NoneType, need a Tensor"):
        getattr(fw, name)(**(inputs(name) | {"g": None}))


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda"])
def test_delta_member_refuses_no_beta_and_a_beta_per_channel(name):
    x = inputs(name)
    with pytest.raises(TypeError, match="beta: got NoneType, need a Tensor"):
        getattr(fw, name)(**(x | {"beta": None}))
    with pytest.raises(ValueError, match=r"beta: got .* need \[B, T, HV\]"):
        getattr(fw, name)(**(x | {"beta": x["beta"][..., None]}))


@pytest.mark.parametrize("name", MEMBERS)
def test_member_passes_the_operators_errors_on(name):
    with pytest.raises(ValueError, match="chunk_size: got 17"):
        getattr(fw, name)(**inputs(name), chunk_size=17)


def of(name, **changes):
    """Inputs of a member in fp32, with changes."""
    x = {key: t.float() for key, t in inputs(name).items()} | changes
    return {key: t for key, t in x.items() if t is not None}


@refused("""
lightning_log_decay(0, 0, 2)
    ValueError: num_heads: got 0, need an integer >= 1
lightning_log_decay(4, 2, 2)
    ValueError: layer: got 2, need 0 to num_layers - 1 = 1
lightning_log_decay(4, -1, 2)
    ValueError: layer: got -1, need 0 to num_layers - 1 = 1
lightning_log_decay(8.0, 0, 2)
    TypeError: num_heads: got float, need an int
lightning_log_decay(8, 0.5, 2)
    TypeError: layer: got float, need an int
lightning_log_decay(8, 0, "2")
    TypeError: num_layers: got str, need an int
retnet_log_decay(-1)
    ValueError: num_heads: got -1, need an integer >= 1
retnet_log_decay(0)
    ValueError: num_heads: got 0, need an integer >= 1
retnet_log_decay(2.5)
    TypeError: num_heads: got float, need an int
gated_retention(**ungated, logits=LOGITS, temperature="1")
    TypeError: temperature: got str, need a real number
linear_attention(**of("linear_attention"), eps=None)
    TypeError: eps: got NoneType, need a real number
linear_attention(**of("linear_attention"), normalize="no")
    TypeError: normalize: got 'no', need True or False
linear_attention(**of("linear_attention"), eps=-1)
    ValueError: eps: got -1, need >= 0
gated_retention(**ungated, logits=LOGITS, temperature=0)
    ValueError: temperature: got 0, need > 0
gated_retention(**ungated, logits=LOGITS[:, 0, 0])
    ValueError: logits: got shape [2], need [B, T, HV]
gated_retention(**ungated, logits=LOGITS[..., :1])
    ValueError: logits: got shape [2, 21, 1], need [2, 21, 2]
gated_retention(**ungated, logits=LOGITS.long())
    TypeError: logits: got torch.int64, need one of (torch.float32,
    torch.float16, torch.bfloat16)
gated_retention(**ungated, logits=LOGITS.double())
    TypeError: logits: got torch.float64, need one of (torch.float32,
    torch.float16, torch.bfloat16)
gated_retention(**ungated, logits=LOGITS.to("meta"))
    ValueError: logits: got device meta, need q's, cpu
linear_attention(**of("linear_attention", initial_state=torch.zeros(B, H, K,
V)), normalize=True)
    ValueError: initial_state: got shape [2, 2, 5, 4], need [2, 2, 5, 5]
linear_attention(**of("linear_attention", initial_state=torch.zeros(B, H, K, V
+ 1).double()), normalize=True)
    TypeError: initial_state: got torch.float64, need torch.float32
linear_attention(**of("linear_attention", initial_state=[1.0]), normalize=True)
    TypeError: initial_state: got list, need a Tensor
linear_attention(**of("linear_attention", v=torch.ones(3)))
    ValueError: v: got shape [3], need [B, T, heads, width]
linear_attention(**of("linear_attention", q=[1.0]))
    TypeError: q: got list, need a Tensor
linear_attention(**of("linear_attention", v=torch.ones(3)), normalize=True)
    ValueError: v: got shape [3], need [B, T, heads, width]
retention(**of("retention", g=None, v=torch.ones(3)))
    ValueError: v: got shape [3], need [B, T, HV, V]
""")
def test_what_is_refused(wrong, error):
    names = {"ungated": of("mamba2", g=None), "LOGITS": torch.zeros(B, T, H)}
    with error():
        eval(wrong, vars(fw) | globals() | names)
