"""fastweights.compat's functions beside their formulas, in fp64."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.pairwise import parametrize_all

from fastweights.checks import relative_error
from fastweights.compat import causal_conv1d, fla
from fastweights.compat.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
)
from fastweights.ops.convolution import short_convolution
from fastweights.reference import steps

FUNCTIONS = [
    f"{how}_{what}"
    for what in ("gated_delta_rule", "kda", "simple_gla")
    for how in ("chunk", "fused_recurrent")
]
H, HV, K, V = 2, 4, 6, 5


def inputs(name, T, cut):
    """Arguments of the function by name, and how they are packed.

    One row of a batch is one sequence, or both lie one after another.
    """
    torch.manual_seed(0)
    heads = HV if "delta" in name or "kda" in name else H
    per_channel = name.endswith("kda")
    shape = (2, T, heads)
    x = {
        "q": torch.rand(2, T, H, K),
        "k": torch.rand(2, T, H, K),
        "v": torch.randn(*shape, V),
        "beta": torch.rand(shape),
        "initial_state": torch.rand(2, heads, K, V),
    }
    if "delta" in name or "kda" in name:
        x["k"] = F.normalize(x["k"], dim=-1)
    x["g"] = -torch.rand(*shape, K) if per_channel else -torch.rand(shape)
    x["A_log"] = torch.randn(heads)
    x["dt_bias"] = torch.randn(heads * K if per_channel else heads)
    x = {key: y.double() for key, y in x.items()}
    if cut:
        for key in ("q", "k", "v", "g", "beta"):
            x[key] = torch.cat([x[key][0], x[key][1, : cut - T]])[None]
        x["cu_seqlens"] = torch.tensor([0, T, cut])
    return x


def arguments(name, T):
    """The function of this name, and of inputs those that it takes."""
    function, x = getattr(fla, name), inputs(name, T, 0)
    takes = inspect.signature(function).parameters
    return function, {key: y for key, y in x.items() if key in takes}


def formula(x, *, scale=None):
    """o and the last state of each sequence, token by token."""
    q, k, v = x["q"], x["k"], x["v"]
    q = q * (K**-0.5 if scale is None else scale)
    groups = v.shape[2] // q.shape[2]
    q, k = (y.repeat_interleave(groups, 2) for y in (q, k))
    g, beta = x.get("g"), x.get("beta")
    if g is not None:
        g = g.expand(v.shape[:3]) if g.dim() == 1 else g
        g = g[..., None] if g.dim() == 3 else g
    T = q.shape[1]
    spans = [(b, 0, T) for b in range(len(q))]
    if "cu_seqlens" in x:
        cu = x["cu_seqlens"].tolist()
        spans = [(0, start, end) for start, end in itertools.pairwise(cu)]
    o = torch.zeros_like(v)
    states = []
    for n, (b, start, end) in enumerate(spans):
        S = x["initial_state"][n]
        for t in range(start, end):
            gates = [y if y is None else y[b, t] for y in (g, beta)]
            S, o[b, t] = steps.recurrence(S, q[b, t], k[b, t], v[b, t], *gates)
        states.append(S)
    return o, torch.stack(states)


def activate(x, bound):
    """The gate, as fla.ops.kda.gate and gated_delta_rule.gate have it."""
    g = x["g"] + x["dt_bias"].view(x["g"].shape[2:])
    A = x["A_log"].exp()
    A = A[:, None] if g.dim() == 4 else A
    if bound is not None:
        return bound / (1 + (-A * g).exp())
    return -A * (1 + g.exp()).log()


CASES = []  # each function with the axes that it takes: all cases differ
for name in FUNCTIONS:
    takes = inspect.signature(getattr(fla, name)).parameters.keys()
    axes = {
        "unit": {False: "q", True: "use_qk_l2norm_in_kernel"},
        "gate": {"given": "q", "kernel": "use_gate_in_kernel"}
        | {"bound": "lower_bound"},
        "beta": {"given": "q", "sigmoid": "use_beta_sigmoid_in_kernel"}
        | {"negative": "allow_neg_eigval"},
        "state": {"none": "q", "first": "q", "v_first": "state_v_first"},
    }
    axes = {
        axis: [x for x, needs in values.items() if needs in takes]
        for axis, values in axes.items()
    }
    layouts = ("few", "many", "packed", "few packed")
    for case in parametrize_all(**axes, layout=layouts).args[1]:
        label = f"{name}-{case.id}"
        CASES.append(
            pytest.param(name, *case.values, id=label, marks=case.marks)
        )


@pytest.mark.parametrize("name, unit, gate, beta, state, layout", CASES)
def test_functions(name, unit, gate, beta, state, layout):
    function = getattr(fla, name)
    takes = inspect.signature(function).parameters
    T = 3 if layout.startswith("few") else 40
    x = inputs(name, T, T + 2 if layout.endswith("packed") else 0)
    scale = 0.7 if layout in ("few", "packed") else None
    wanted = {"scale": scale, "output_final_state": state != "none"}
    options = {
        "use_qk_l2norm_in_kernel": unit,
        "use_gate_in_kernel": gate != "given",
        "use_beta_sigmoid_in_kernel": beta != "given",
        "allow_neg_eigval": beta == "negative",
        "state_v_first": state == "v_first",
        "lower_bound": -3.0 if gate == "bound" else None,
    }
    wanted |= {key: y for key, y in options.items() if key in takes}
    given = {key: y for key, y in x.items() if key in takes}
    v_first = state == "v_first"
    if state == "none":
        del given["initial_state"]
        x["initial_state"] = torch.zeros_like(x["initial_state"])
    elif v_first:
        given["initial_state"] = x["initial_state"].mT.clone()
    before = {key: y.clone() for key, y in given.items() if torch.is_tensor(y)}
    o, final = function(**given, **wanted)
    for key, y in before.items():
        assert torch.equal(given[key], y), key

    if unit:
        for key in "qk":
            x[key] = x[key] / (x[key].pow(2).sum(-1)[..., None] + 1e-6).sqrt()
    if gate != "given":
        x["g"] = activate(x, -3.0 if gate == "bound" else None)
    if beta != "given":
        x["beta"] = 1 / (1 + (-x["beta"]).exp())
        x["beta"] = x["beta"] * (2 if beta == "negative" else 1)
    if "beta" not in takes:
        del x["beta"]
    ref, last = formula(x, scale=scale)
    assert relative_error(o, ref) <= 1e-11
    if state == "none":
        assert final is None
    else:
        last = last.mT if v_first else last
        assert relative_error(final, last) <= 1e-11
        assert final.is_contiguous()


def test_a_decay_per_head_and_one_per_channel_together():
    x = inputs("chunk_gated_delta_rule", 20, 0)
    gk = -torch.rand(2, 20, HV, K, dtype=torch.float64)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    given = {key: x[key] for key in names}
    o, _ = fla.fused_recurrent_gated_delta_rule(**given, gk=gk)
    x["g"] = x["g"][..., None] + gk
    assert relative_error(o, formula(x)[0]) <= 1e-11
    del given["g"], given["beta"]
    o, _ = fla.fused_recurrent_gated_delta_rule(**given, gk=gk)
    x["g"], x["beta"] = gk, torch.ones_like(x["beta"])
    assert relative_error(o, formula(x)[0]) <= 1e-11


@pytest.mark.parametrize("how", ["chunk", "fused_recurrent"])
def test_a_fixed_decay(how):
    x = inputs(f"{how}_simple_gla", 9, 0)
    fixed = torch.tensor([-0.1, -0.7], dtype=torch.float64)
    given = {key: x[key] for key in ("q", "k", "v", "initial_state")}
    o, _ = getattr(fla, f"{how}_simple_gla")(**given, g_gamma=fixed)
    ref, _ = formula({**given, "g": fixed})
    assert relative_error(o, ref) <= 1e-11


def test_the_bound_alone_is_a_gate():
    x = inputs("chunk_kda", 9, 0)
    given = {key: x[key] for key in ("q", "k", "v", "g", "beta")}
    o, _ = fla.chunk_kda(
        **given, use_gate_in_kernel=True, lower_bound=-5.0, safe_gate=True
    )
    x["g"] = -5 / (1 + (-x["g"]).exp())
    x["initial_state"] = torch.zeros_like(x["initial_state"])
    assert relative_error(o, formula(x)[0]) <= 1e-11


@pytest.mark.parametrize("name", FUNCTIONS[:4])
def test_the_offsets_by_the_name_that_transformers_gives_them(name):
    x = inputs(name, 20, 25)
    given = {key: x[key] for key in ("q", "k", "v", "g", "beta")}
    function, cu = getattr(fla, name), x["cu_seqlens"]
    want, _ = function(**given, cu_seqlens=cu)
    got, _ = function(**given, cu_seq_lens_q=cu)
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="cu_seq_lens_q: got"):
        function(**given, cu_seqlens=cu, cu_seq_lens_q=cu)


@pytest.mark.parametrize("name", FUNCTIONS[:4])
def test_documents_by_the_number_of_each_token(name):
    """seq_idx, of rows that lie side by side; with offsets, these count."""
    x, function = inputs(name, 10, 0), getattr(fla, name)
    given = {key: x[key] for key in ("q", "k", "v", "g", "beta")}
    seq_idx = torch.tensor([[0] * 3 + [1] * 7, [4] * 9 + [1]])
    cu = torch.tensor([0, 3, 10, 19, 20])
    flat = {key: y.flatten(0, 1)[None] for key, y in given.items()}
    want, last = function(**flat, cu_seqlens=cu, output_final_state=True)
    got, final = function(**given, seq_idx=seq_idx, output_final_state=True)
    assert torch.equal(got, want.reshape(got.shape))
    assert torch.equal(final, last[[1, 3]])
    seq_idx[1, 3:] = 1  # in place: another document
    want, _ = function(**flat, cu_seqlens=torch.tensor([0, 3, 10, 13, 20]))
    got, _ = function(**given, seq_idx=seq_idx)
    assert torch.equal(got, want.reshape(got.shape))
    got, _ = function(**flat, cu_seq_lens_q=cu, seq_idx=seq_idx)
    assert torch.equal(got, function(**flat, cu_seqlens=cu)[0])
    with pytest.raises(ValueError, match="seq_idx: got documents beside"):
        function(**given, seq_idx=seq_idx, initial_state=x["initial_state"])
    with pytest.raises(ValueError, match=r"seq_idx: .* need \[2, 10\]"):
        function(**given, seq_idx=seq_idx[:1])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("T", [3, 40])
def test_keys_in_fp32_beside_values_in_fp16(name, T):
    """In the arithmetic of the wider; o has v's dtype, as FLA's has."""
    function, x = arguments(name, T)
    x = {key: y.float() for key, y in x.items()}
    x |= {"v": x["v"].half(), "output_final_state": True}
    o, state = function(**x)
    want, last = function(**{**x, "v": x["v"].float()})
    assert o.dtype == torch.float16 and state.dtype == torch.float32
    assert torch.equal(o, want.half()) and torch.equal(state, last)


CHUNKS = [
    ("chunk_gated_delta_rule", (16, 32, 64), (8, 48, 128)),
    ("chunk_kda", (32, 64), (8, 48, 128)),
    ("chunk_simple_gla", (8, 16, 64, 128), (0, 48)),
]


@pytest.mark.parametrize("name, right, wrong", CHUNKS)
def test_the_chunk_sizes_are_those_that_fla_takes(name, right, wrong):
    function, x = arguments(name, 40)
    want, _ = function(**x)
    for size in right:
        assert relative_error(function(**x, chunk_size=size)[0], want) <= 1e-12
    for size in wrong:
        with pytest.raises(ValueError, match=f"^chunk_size: got {size}, need"):
            function(**x, chunk_size=size)


def test_keys_wider_than_256():
    torch.manual_seed(0)
    q, k = F.normalize(torch.randn(2, 1, 20, 1, 320), dim=-1).double()
    v, g = torch.randn(1, 20, 1, 3).double(), -torch.rand(1, 20, 1).double()
    beta, first = -g, torch.zeros(1, 1, 320, 3, dtype=torch.float64)
    o, _ = fla.chunk_gated_delta_rule(q, k, v, g, beta)
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": first}
    assert relative_error(o, formula(x, scale=320**-0.5)[0]) <= 1e-11


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_in_fp32(name):
    """A few tokens with a state too, which decode_step would not have."""
    function, x = arguments(name, 4)
    x = {key: y for key, y in x.items() if key not in ("A_log", "dt_bias")}
    options = {}
    if name.endswith(("delta_rule", "kda")):
        options["use_qk_l2norm_in_kernel"] = True
    grads = {}
    for dtype in (torch.float32, torch.float64):
        y = {key: z.to(dtype).requires_grad_() for key, z in x.items()}
        o, final = function(**y, **options, output_final_state=True)
        assert o.dtype == final.dtype == dtype
        (o.square().sum() + final.sum()).backward()
        grads[dtype] = {key: z.grad for key, z in y.items()}
    for key, grad in grads[torch.float32].items():
        assert relative_error(grad, grads[torch.float64][key]) <= 1e-5, key


def test_half_precision_keeps_states_and_gates_in_fp32():
    x = {key: y.float() for key, y in inputs(FUNCTIONS[0], 20, 0).items()}
    del x["A_log"], x["dt_bias"]
    want, last = fla.chunk_gated_delta_rule(**x, output_final_state=True)
    y = {key: z.bfloat16() for key, z in x.items()}
    o, state = fla.chunk_gated_delta_rule(**y, output_final_state=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert relative_error(o, want) <= 0.02
    assert relative_error(state, last) <= 0.02
    y = {**x, "beta": x["beta"].bfloat16(), "g": x["g"].bfloat16()}
    o, _ = fla.chunk_gated_delta_rule(**y)
    assert o.dtype == torch.float32 and relative_error(o, want) <= 0.02


TWO_KEYS = [
    *("chunk_gdn2", "fused_recurrent_gdn2"),
    *("chunk_comba", "fused_recurrent_comba"),
    *("chunk_rwkv7", "chunk_gated_delta_product"),
]


def two_keys(name, T):
    """Arguments by name; three steps per token of DeltaProduct."""
    torch.manual_seed(0)
    shape, n = (2, T, HV), 3 if name.endswith("product") else 1
    each = (2, n * T, HV)
    x = {
        "k": F.normalize(torch.randn(*each, K), dim=-1),
        "v": torch.randn(*each, V),
        "beta": torch.rand(each),
        "q": torch.randn(*shape, K),
        "initial_state": torch.randn(2, HV, K, V),
        "p": torch.randn(*shape, K),
        "g": -torch.rand(*shape, *[K] * name.endswith("gdn2")),
        "b": torch.rand(*shape, K),
        "w": torch.rand(*shape, V),
    }
    if n > 1:
        x["num_householder"] = n
    if name.endswith("rwkv7"):
        kappa = F.normalize(torch.randn(*shape, K), dim=-1)
        x |= {"r": x["q"], "w": -torch.rand(*shape, K)}
        x |= {"a": -kappa, "b": x["b"] * kappa}
    takes = inspect.signature(getattr(fla, name)).parameters
    x = {key: y for key, y in x.items() if key in takes}
    return {k: y.double() if torch.is_tensor(y) else y for k, y in x.items()}


def run_steps(name, x, scale):
    """FLA's recurrences as naive.py has them, but Comba's as its kernels."""
    S, outputs = x["initial_state"], []
    read, outer = steps.read, steps.outer
    for t in range(x["q" if "q" in x else "r"].shape[1]):
        y = {
            key: z[:, t]
            for key, z in x.items()
            if torch.is_tensor(z) and key != "initial_state"
        }
        if name.endswith("gdn2"):
            named = (y[n] for n in ("q", "k", "v", "g", "b", "w"))
            S, _ = steps.gated_deltanet2(S, *named)
        elif name.endswith("comba"):
            named = (y[n] for n in ("q", "k", "v", "p", "g", "beta"))
            S, _ = steps.comba(S, *named)
        elif name.endswith("rwkv7"):
            old = outer(y["b"], read(S, y["a"]))
            S = y["w"].exp()[..., None] * S + old + outer(y["k"], y["v"])
        else:
            S = y["g"].exp()[..., None, None] * S
            for i in range(3 * t, 3 * t + 3):
                k, v, beta = (x[key][:, i] for key in ("k", "v", "beta"))
                S, _ = steps.deltanet(S, k, k, v, beta)
        outputs.append(scale * read(S, y["q"] if "q" in y else y["r"]))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("T", [3, 40])
@pytest.mark.parametrize("name", TWO_KEYS)
def test_a_key_that_erases(name, T):
    function, x = getattr(fla, name), two_keys(name, T)
    scale = 1.0 if name.endswith("rwkv7") else K**-0.5
    want, last = run_steps(name, x, scale)
    o, state = function(**x, output_final_state=True)
    assert relative_error(o, want) <= 1e-11
    assert relative_error(state, last) <= 1e-11
    tokens = {
        key: y.flatten(0, 1)[None] if torch.is_tensor(y) else y
        for key, y in x.items()
        if key != "initial_state"
    }
    offsets, first = torch.tensor([0, T, 2 * T]), x["initial_state"]
    o, _ = function(**tokens, cu_seqlens=offsets, initial_state=first)
    assert relative_error(o, want.flatten(0, 1)[None]) <= 1e-11


@pytest.mark.parametrize("name", [x for x in TWO_KEYS if "rwkv7" not in x])
def test_keys_that_erase_are_brought_to_unit_length(name):
    x = two_keys(name, 20)
    y = x | {key: of_length_one(x[key]) for key in ("q", "k", "p") if key in x}
    want, _ = getattr(fla, name)(**y)
    x["k"] = 3 * x["k"]
    o, _ = getattr(fla, name)(**x, use_qk_l2norm_in_kernel=True)
    assert relative_error(o, want) <= 1e-6


def of_length_one(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("chunk_gdn2", {"b": torch.rand(2, 9, HV)}, "b: got shape"),
        ("chunk_gdn2", {"w": torch.rand(2, 9, HV, K)}, "w: got shape"),
        ("chunk_comba", {"p": torch.rand(2, 9, 1, K)}, "p: got shape"),
        ("chunk_rwkv7", {"w": torch.rand(2, 9, HV, V)}, "w: got shape"),
        ("chunk_gated_delta_product", {"num_householder": 2}, "k: got shape"),
    ],
)
def test_what_a_key_that_erases_needs(name, wrong, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(fla, name)(**two_keys(name, 9) | wrong)


REFUSED = {
    NotImplementedError: [
        ("fused_recurrent_simple_gla", {"reverse": True}),
        ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(1)}),
        ("chunk_kda", {"return_intermediate_states": True}),
        ("chunk_kda", {"use_graph": True}),
        ("chunk_kda", {"max_num_seqs": 4}),
        ("chunk_kda", {"cp_context": object()}),
    ],
    TypeError: [
        ("chunk_kda", {"chunk_size": 32.0}),
        ("chunk_simple_gla", {"v": 3}),
        ("chunk_simple_gla", {"initial_state": 3}),
        ("chunk_simple_gla", {"cu_seqlens": [0, 5]}),
        ("chunk_simple_gla", {"output_final_state": "yes"}),
        ("chunk_kda", {"use_qk_l2norm_in_kernel": 2}),
        ("chunk_kda", {"seq_idx": 0}),
    ],
    ValueError: [
        ("chunk_kda", {"g": torch.zeros(2, 5, HV)}),
        ("chunk_gated_delta_rule", {"g": torch.zeros(2, 5, HV, K)}),
        ("chunk_simple_gla", {"g": torch.zeros(2, 5, H, K)}),
        ("chunk_simple_gla", {"g_gamma": torch.zeros(2, 1), "g": None}),
        ("fused_recurrent_gated_delta_rule", {"gk": torch.zeros(2, 5, H)}),
        ("chunk_simple_gla", {"q": torch.zeros(2, 5, K)}),
        (
            "chunk_kda",
            {"dt_bias": torch.zeros(HV), "use_gate_in_kernel": True},
        ),
        (
            "chunk_gated_delta_rule",
            {"A_log": torch.zeros(HV, K), "use_gate_in_kernel": True},
        ),
        (
            "chunk_kda",
            {"lower_bound": float("nan"), "use_gate_in_kernel": True},
        ),
        ("chunk_kda", {"allow_neg_eigval": True}),
        ("chunk_kda", {"A_log": None, "use_gate_in_kernel": True}),
        (
            "chunk_kda",
            {
                "lower_bound": -6.0,
                "use_gate_in_kernel": True,
                "safe_gate": True,
            },
        ),
        ("chunk_simple_gla", {"g_gamma": torch.zeros(2)}),
        (
            "fused_recurrent_gated_delta_rule",
            {"g": None, "use_gate_in_kernel": True},
        ),
        (
            "fused_recurrent_gated_delta_rule",
            {"beta": None, "use_beta_sigmoid_in_kernel": True},
        ),
    ],
}


@pytest.mark.parametrize(
    "name, wrong, error",
    [(*case, error) for error, cases in REFUSED.items() for case in cases],
)
def test_what_is_refused_is_named(name, wrong, error):
    function, x = arguments(name, 5)
    del x["initial_state"]
    argument = next(iter(wrong))
    with pytest.raises(error, match=f"^{argument}: got .*, need "):
        function(**{**x, **wrong})


def test_a_wrong_call_is_refused_in_the_functions_name():
    x = torch.ones(1, 1, 1, 1)
    with pytest.raises(TypeError, match=r"chunk_kda\(\) .* 'head_first'"):
        fla.chunk_kda(x, x, x, x, x, head_first=True)
    with pytest.raises(TypeError, match=r"chunk_kda\(\) missing 1 .* 'beta'"):
        fla.chunk_kda(x, x, x, x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_explained(name):
    function = getattr(fla, name)
    for argument in inspect.signature(function).parameters:
        assert f"\n    {argument}: " in function.__doc__


def convolve_document(x, weight, bias, activation, before, document):
    """y [B, D, T] by a loop over everything."""
    B, D, T = x.shape
    W = weight.shape[1]
    y = torch.zeros_like(x)
    for b in range(B):
        for t in range(T):
            total = torch.zeros(D, dtype=x.dtype)
            for w in range(W):
                s = t - (W - 1) + w
                if s < 0 and before is not None:
                    total += weight[:, w] * before[b, :, s]
                elif s >= 0 and document[b][s] == document[b][t]:
                    total += weight[:, w] * x[b, :, s]
            y[b, :, t] = total if bias is None else total + bias
    return y / (1 + (-y).exp()) if activation else y


@parametrize_all(
    W=(4, 2, 3, 7),
    bias=(False, True),
    activation=(None, "silu", "swish"),
    packing=("none", "states", "seq_idx", "offsets", "cached"),
    dtype=(torch.float64, torch.float32),
)
def test_convolution(W, bias, activation, packing, dtype):
    torch.manual_seed(0)
    B = 1 if packing in ("offsets", "cached") else 2
    x = torch.randn(B, 3, 12, dtype=dtype)
    weight = torch.randn(3, W, dtype=dtype)
    b = torch.randn(3, dtype=dtype) if bias else None
    before, document, options = None, [[0] * 12] * B, {}
    if packing == "states":
        before = torch.randn(B, 3, W - 1, dtype=dtype)
        options = {"initial_states": before, "return_final_states": True}
        options["final_states_out"] = torch.empty_like(before)
    elif packing == "seq_idx":
        document = [[0] * 2 + [1] * 7 + [2] * 3, [4] * 11 + [5]]
        options = {"seq_idx": torch.tensor(document, dtype=torch.int32)}
    elif packing == "offsets":
        document = [[0] * 2 + [1] * 7 + [2] * 3]
        offsets = torch.tensor([0, 2, 9, 9, 12], dtype=torch.int32)
        options = {"cu_seq_lens_q": offsets}
        options["seq_idx"] = torch.tensor(document)
    elif packing == "cached":
        document = [[0] * 5 + [1] * 7]
        options = {"cu_seq_lens_q": torch.tensor([0, 1, 8])}
    y = causal_conv1d_fn(x, weight, b, activation=activation, **options)
    ref = convolve_document(x, weight, b, activation, before, document)
    if packing == "states":
        y, final = y
        assert final is options["final_states_out"]
        both = torch.cat([before, x], -1)
        assert torch.equal(final, both[..., 12:])
    assert y.dtype == dtype
    assert relative_error(y, ref) <= (1e-15 if dtype.itemsize == 8 else 1e-6)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_convolution_of_rows_of_documents(graph):
    """In a graph there are as many documents as tokens, most of them empty."""
    torch.manual_seed(0)
    seq_idx = torch.tensor([[0] * 2 + [1] * 7 + [2] * 3, [4] * 11 + [5]])
    x, weight = torch.randn(2, 3, 12), torch.randn(3, 4)
    convolve = causal_conv1d_fn
    if graph:
        convolve = torch.compile(convolve, backend="eager", fullgraph=True)
    y = convolve(x, weight, None, seq_idx)
    ref = convolve_document(x, weight, None, None, None, seq_idx.tolist())
    assert relative_error(y, ref) <= 1e-6


def test_the_convolution_of_documents_costs_their_number(monkeypatch):
    """Rows before each document, and not before each token."""
    numbers = []

    def spy(*args, cu_seqlens, **options):
        numbers.append(len(cu_seqlens) - 1)
        return short_convolution(*args, cu_seqlens=cu_seqlens, **options)

    monkeypatch.setattr(causal_conv1d, "short_convolution", spy)
    seq_idx = torch.arange(4).repeat_interleave(5).view(2, 10)
    causal_conv1d_fn(torch.ones(2, 3, 10), torch.ones(3, 4), None, seq_idx)
    assert numbers == [4]


def test_tokens_of_no_document_get_zero():
    seq_idx = torch.tensor([[0, 0, -1, -1, 1]])
    x, weight = torch.ones(1, 2, 5), torch.ones(2, 2)
    y = causal_conv1d_fn(x, weight, torch.ones(2), seq_idx)
    assert y[0, 0].tolist() == [2, 3, 0, 0, 2]


@pytest.mark.parametrize("L", [3, 4, 6])
@pytest.mark.parametrize("T", [None, 1, 5])
def test_convolution_token_by_token(L, T):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12)
    weight, b = torch.randn(3, 4), torch.randn(3)
    want = causal_conv1d_fn(x, weight, b, activation="silu")
    state = F.pad(x[..., :7], (6, 0))[..., -L:].clone()
    new = x[..., 7] if T is None else x[..., 7 : 7 + T]
    y = causal_conv1d_update(new, state, weight, b, "silu")
    assert y.shape == new.shape
    end = 8 if T is None else 7 + T
    ref = want[..., 7] if T is None else want[..., 7:end]
    assert relative_error(y, ref) <= 1e-6
    assert torch.equal(state, F.pad(x[..., :end], (6, 0))[..., -L:])


X, TAPS, CU = torch.ones(2, 3, 5), torch.ones(3, 4), torch.tensor([0, 5])
WRONG = [
    ({"activation": "gelu"}, ValueError),
    ({"x": 3}, TypeError),
    ({"x": X[0]}, ValueError),
    ({"x": X.long()}, TypeError),
    ({"weight": None}, TypeError),
    ({"weight": TAPS[:2]}, ValueError),
    ({"weight": torch.ones(2, 9)}, ValueError),
    ({"weight": torch.ones(3, 0)}, ValueError),
    ({"bias": 1.0}, TypeError),
    ({"bias": torch.ones(4), "weight": torch.ones(3, 9)}, ValueError),
    ({"seq_idx": 3}, TypeError),
    ({"seq_idx": torch.zeros(2, 4)}, ValueError),
    ({"seq_idx": torch.zeros(2, 5)}, TypeError),
    ({"seq_idx": torch.zeros(2, 5), "return_final_states": True}, ValueError),
    ({"initial_states": 3}, TypeError),
    ({"initial_states": X}, ValueError),
    ({"final_states_out": X, "return_final_states": True}, ValueError),
    ({"return_final_states": "yes"}, TypeError),
    ({"cu_seq_lens_q": CU, "initial_states": X}, ValueError),
    ({"x": X, "cu_seq_lens_q": CU}, ValueError),
    ({"cu_seq_lens_q": [0, 5], "x": X[:1]}, TypeError),
    ({"cu_seq_lens_q": CU.float(), "x": X[:1]}, TypeError),
    ({"cu_seq_lens_q": CU + 1, "x": X[:1]}, ValueError),
    ({"cu_seq_lens_q": torch.tensor([0, 6]), "x": X[:1]}, ValueError),
    (
        {"cu_seq_lens_q": torch.tensor([0, 4, 2, 5]), "x": X[:1]}
        | {"weight": torch.ones(3, 9)},
        ValueError,
    ),
]


@pytest.mark.parametrize(
    "wrong, error", WRONG, ids=["-".join(x) for x, _ in WRONG]
)
def test_convolution_refuses_by_name(wrong, error):
    name = next(iter(wrong))
    with pytest.raises(error, match=f"^{name}: got .*, need "):
        causal_conv1d_fn(**({"x": X, "weight": TAPS} | wrong))


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"x": 3}, TypeError),
        ({"x": X[0, 0]}, ValueError),
        ({"weight": torch.ones(4, 4)}, ValueError),
        ({"conv_state": 3}, TypeError),
        ({"conv_state": X[..., :2]}, ValueError),
        ({"conv_state": X[:1]}, ValueError),
        ({"activation": "gelu"}, ValueError),
        ({"cache_seqlens": CU}, NotImplementedError),
        ({"conv_state_indices": CU}, NotImplementedError),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_step_of_the_convolution_refuses_by_name(wrong, error):
    name = next(iter(wrong))
    given = {"x": X, "conv_state": X, "weight": TAPS} | wrong
    with pytest.raises(error, match=f"^{name}: got .*, need "):
        causal_conv1d_update(**given)
