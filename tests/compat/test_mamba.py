"""compat.mamba_ssm's functions beside their formulas, in fp64."""

import math

import pytest
import torch
from support.pairwise import parametrize_all
from support.scan_inputs import selective_scan_fn as mambas

from fastweights.checks import relative_error
from fastweights.compat.mamba_ssm import (
    mamba_chunk_scan_combined,
    selective_scan_fn,
    selective_state_update,
)

H, P, N, T = 4, 3, 5, 9


def inputs(G=2, **to):
    torch.manual_seed(0)
    x = {
        "x": torch.randn(2, T, H, P),
        "dt": torch.randn(2, T, H),
        "A": -torch.rand(H),
        "B": torch.randn(2, T, G, N),
        "C": torch.randn(2, T, G, N),
        "D": torch.randn(H),
        "z": torch.randn(2, T, H, P),
        "dt_bias": torch.randn(H),
        "initial_states": torch.randn(2, H, P, N),
    }
    to = to or {"dtype": torch.float64}
    return {name: t.to(**to) for name, t in x.items()}


def formula(x, *, softplus, limit=(0.0, math.inf), document=None):
    """y and each row's last state, token by token and head by head."""
    dt = x["dt"] + x.get("dt_bias", 0)
    dt = (1 + dt.exp()).log() if softplus else dt
    dt = dt.clip(*limit)
    y = torch.zeros_like(x["x"])
    last = torch.zeros(2, H, P, N, dtype=y.dtype)
    D = x.get("D", torch.zeros(H, dtype=y.dtype))
    D = D if D.dim() == 2 else D[:, None].expand(H, P)
    for b in range(2):
        for h in range(H):
            g = h // (H // x["B"].shape[2])
            S = last[b, h]
            if "initial_states" in x:
                S = x["initial_states"][b, h]
            for t in range(dt.shape[1]):
                if document and t and document[b][t] != document[b][t - 1]:
                    S = torch.zeros_like(S)
                step, u = dt[b, t, h], x["x"][b, t, h]
                S = (step * x["A"][h]).exp() * S
                S = S + step * torch.outer(u, x["B"][b, t, g])
                y[b, t, h] = S @ x["C"][b, t, g] + D[h] * u
            last[b, h] = S
    if "z" in x:
        y = y * x["z"] / (1 + (-x["z"]).exp())
    return y, last


@parametrize_all(
    G=(2, 1, 4),
    softplus=(True, False),
    limit=((0.0, math.inf), (0.1, 0.5)),
    without=((), ("z", "dt_bias")),
    D=(None, "per head", "per channel"),
    packed=("", "state", "seq_idx", "cu_seqlens", "cu_seq_lens_q"),
)
def test_chunk_scan(G, softplus, limit, without, D, packed):
    x = inputs(G)
    x = {name: t for name, t in x.items() if name not in without}
    if not softplus:
        x["dt"] = x["dt"].abs()
        x.pop("dt_bias", None)
    if D is None:
        del x["D"]
    elif D == "per channel":
        x["D"] = torch.randn(H, P, dtype=torch.float64)
    document, options = None, {}
    if packed != "state":
        del x["initial_states"]
    if packed == "seq_idx":
        document = [[0, 0, 0, 1, 1, 2, 2, 2, 2], [5] * 8 + [1]]
        options["seq_idx"] = torch.tensor(document)
    elif packed.startswith("cu"):
        document = [[0] * 4 + [1] * 5] * 2
        options[packed] = torch.tensor([0, 4, 9], dtype=torch.int32)
    want, last = formula(x, softplus=softplus, limit=limit, document=document)
    if packed.startswith("cu"):
        row = ("x", "dt", "B", "C", "z")
        x = {name: t[:1] if name in row else t for name, t in x.items()}
        want, last = want[:1], last[:1]
    options |= {"dt_softplus": softplus, "dt_limit": limit}
    y, final = mamba_chunk_scan_combined(
        **x, chunk_size=4, **options, return_final_states=True
    )
    assert relative_error(y, want) <= 1e-13
    assert relative_error(final, last) <= 1e-13
    assert torch.equal(mamba_chunk_scan_combined(**x, **options), y)


def one_token(x, tied=True):
    """Arguments of a step: with heads, or without if x has none."""
    cut = {name: x[name][:, 0] for name in ("x", "B", "C", "z")}
    cut["dt"] = x["dt"][:, 0, :, None].expand(2, H, P)
    cut["A"] = x["A"][:, None, None].expand(H, P, N)
    cut["D"] = x["D"][:, None].expand(H, P)
    cut["dt_bias"] = x["dt_bias"][:, None].expand(H, P)
    if not tied:
        cut = {name: t.contiguous() for name, t in cut.items()}
    return cut


@parametrize_all(
    steps=("per head", "per channel", "no heads"),
    softplus=(True, False),
    without=((), ("D",), ("z", "dt_bias")),
    dtype=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
)
def test_step(steps, softplus, without, dtype):
    """Heads that share a step or not; states in any dtype."""
    heads, tied = steps != "no heads", steps == "per head"
    x = inputs(H if heads else 1)
    x["dt"] = x["dt"].abs()
    x["dt_bias"] = x["dt_bias"].abs()
    cut = one_token(x, tied)
    x = {name: t for name, t in x.items() if name not in without}
    cut = {name: t for name, t in cut.items() if name not in without}
    state = x["initial_states"].to(dtype).clone()
    x["initial_states"] = state.double().clone()
    if not heads:  # all channels side by side, one group
        for name in ("x", "dt", "z"):
            cut |= {name: cut[name].flatten(1)} if name in cut else {}
        for name in ("A", "D", "dt_bias"):
            cut |= {name: cut[name].flatten(0, 1)} if name in cut else {}
        cut |= {name: cut[name][:, 0] for name in ("B", "C")}
        state = state.flatten(1, 2)
    y = selective_state_update(state, **cut, dt_softplus=softplus)
    x = {name: t[:, :1] if t.dim() > 2 else t for name, t in x.items()} | {
        "initial_states": x["initial_states"]
    }
    want, last = formula(x, softplus=softplus)
    assert state.dtype == dtype
    assert relative_error(y, want.reshape(y.shape)) <= 1e-13
    eps = torch.finfo(dtype).eps
    assert relative_error(state, last.reshape(state.shape)) <= max(eps, 1e-13)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_rows_of_a_pool(tied, dtype):
    x = inputs(H)
    cut = one_token(x, tied)
    pool = torch.randn(5, H, P, N).to(dtype)
    before = pool.clone()
    rows = torch.tensor([3, 0])
    own = pool[rows]
    want = selective_state_update(own, **cut, dt_softplus=True)
    found = selective_state_update(
        pool, **cut, dt_softplus=True, state_batch_indices=rows
    )
    assert torch.equal(found, want) and torch.equal(pool[rows], own)
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])
    cut["x"] = cut["x"].clone().requires_grad_()
    with pytest.raises(ValueError, match="gradient"):
        selective_state_update(pool, **cut, state_batch_indices=rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_b_and_c_in_fp32_beside_x_in_half_precision(dtype):
    """Are not rounded: neither for a step nor for the scans."""
    x = inputs(dtype=torch.float32)
    del x["D"], x["z"]
    x["x"] = x["x"].to(dtype)
    exact = {name: t.double() for name, t in x.items()}
    options = {"dt_softplus": True, "return_final_states": True}
    _, state = mamba_chunk_scan_combined(**x, **options)
    _, want = mamba_chunk_scan_combined(**exact, **options)
    assert relative_error(state, want) <= 1e-6
    found, ref = x["initial_states"].clone(), exact["initial_states"].clone()
    for S, y in ((found, x), (ref, exact)):
        y["D"], y["z"] = torch.zeros(H), torch.ones_like(y["x"])
        selective_state_update(S, **one_token(y), dt_softplus=True)
    assert relative_error(found, ref) <= 1e-6
    u, B = x["x"][:, :, 0].mT, x["B"][:, :, 0].mT
    A = -torch.rand(P, N)
    given = (u, u.abs(), A, B, B)
    _, last = selective_scan_fn(*given, return_last_state=True)
    wide = [t.double() for t in given]
    _, want = selective_scan_fn(*wide, return_last_state=True)
    assert relative_error(last, want) <= 1e-6


def test_channels_of_a_head_with_steps_of_their_own():
    """As the same channels without heads."""
    x = inputs(1)
    cut = {name: x[name][:, 0] for name in ("x", "B", "C", "z")}
    cut |= {"dt": torch.rand(2, H, P).double(), "A": -torch.rand(H, P, N)}
    cut |= {"D": torch.rand(H, P).double()}
    state = x["initial_states"].clone()
    y = selective_state_update(state, **cut)
    flat = x["initial_states"].flatten(1, 2).clone()
    for name in ("x", "dt", "z"):
        cut[name] = cut[name].flatten(1)
    for name in ("A", "D"):
        cut[name] = cut[name].flatten(0, 1).double()
    cut |= {name: cut[name][:, 0] for name in ("B", "C")}
    want = selective_state_update(flat, **cut)
    assert relative_error(y.flatten(1), want) <= 1e-6
    assert relative_error(state.flatten(1, 2), flat) <= 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_has_gradients(tied):
    x = inputs()
    cut = {name: t.requires_grad_() for name, t in x.items()}
    cut = one_token(cut, tied)
    state = x["initial_states"].detach().clone()
    y = selective_state_update(state, **cut, dt_softplus=True)
    (y.square().sum() + state.square().sum()).backward()
    found = {name: x[name].grad.clone() for name in ("A", "B", "dt", "D")}
    for t in x.values():
        t.grad = None
    whole = {n: t if t.dim() < 3 else t[:, :1] for n, t in x.items()}
    whole["initial_states"] = x["initial_states"].detach()
    want, last = mamba_chunk_scan_combined(
        **whole, dt_softplus=True, return_final_states=True
    )
    (want.square().sum() + last.square().sum()).backward()
    for name, grad in found.items():
        assert relative_error(grad, x[name].grad) <= 1e-12, name


def test_half_precision_keeps_steps_and_states_in_fp32():
    x = inputs(dtype=torch.float64)
    narrow = {name: t.bfloat16() for name, t in x.items()}
    exact = {name: t.double() for name, t in narrow.items()}
    del narrow["z"], exact["z"]
    options = {"dt_softplus": True, "return_final_states": True}
    y, state = mamba_chunk_scan_combined(**narrow, **options)
    want, last = mamba_chunk_scan_combined(**exact, **options)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert relative_error(y, want) <= 0.01
    assert relative_error(state, last) <= 0.005


@pytest.mark.parametrize("groups", [None, 2])
def test_selective_scan_in_mambas_layout(groups):
    torch.manual_seed(0)
    D = 4
    G = () if groups is None else (groups,)
    shapes = {"u": (2, D, T), "delta": (2, D, T), "B": (2, *G, N, T)}
    shapes |= {"C": (2, *G, N, T), "D": (D,), "z": (2, D, T)}
    x = {name: torch.randn(s).double() for name, s in shapes.items()}
    A, bias = -torch.rand(D, N).double(), torch.randn(D).double()
    y, last = selective_scan_fn(
        **x, A=A, delta_bias=bias, delta_softplus=True, return_last_state=True
    )
    want, h = mambas(**x, A=A, delta_bias=bias)
    assert relative_error(y, want) <= 1e-13
    assert relative_error(last, h) <= 1e-13
    alone = selective_scan_fn(x["u"], x["delta"].abs(), A, x["B"], x["C"])
    assert alone.shape == y.shape


REFUSED = [
    ({"x": torch.zeros(2, T, H)}, ValueError),
    ({"B": torch.zeros(2, T, 3, N)}, ValueError),
    ({"C": torch.zeros(2, T, 1, N)}, ValueError),
    ({"dt": torch.zeros(2, T)}, ValueError),
    ({"A": 3}, TypeError),
    ({"D": torch.zeros(P)}, ValueError),
    ({"z": torch.zeros(2, T, H)}, ValueError),
    ({"dt_bias": torch.zeros(H, P)}, ValueError),
    ({"initial_states": torch.zeros(2, H, N, P)}, ValueError),
    ({"seq_idx": torch.zeros(2, T + 1)}, ValueError),
    ({"seq_idx": torch.zeros(2, T)}, TypeError),
    ({"cu_seqlens": [0, 4, 9]}, TypeError),
    ({"dt_softplus": "yes"}, TypeError),
    ({"dt_limit": (1.0, 0.0)}, ValueError),
    ({"return_varlen_states": True}, NotImplementedError),
    (
        {"initial_states": torch.zeros(2, H, P, N)}
        | {"seq_idx": torch.zeros(2, T).int()},
        ValueError,
    ),
]


@pytest.mark.parametrize(
    "wrong, error", REFUSED, ids=["-".join(x) for x, _ in REFUSED]
)
def test_what_is_refused_is_named(wrong, error):
    x = inputs()
    del x["initial_states"]
    name = next(iter(wrong))
    with pytest.raises(error, match=f"^{name}: got .*, need "):
        mamba_chunk_scan_combined(**(x | wrong))


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"x": torch.zeros(2, 1, H, P)}, ValueError),
        ({"A": torch.zeros(H, N)}, ValueError),
        ({"dt": torch.zeros(2, H)}, ValueError),
        ({"D": torch.zeros(H)}, ValueError),
        ({"B": 3}, TypeError),
        ({"dt_softplus": 1}, TypeError),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_a_step_refuses_is_named(wrong, error):
    x = inputs()
    state, name = x["initial_states"], next(iter(wrong))
    with pytest.raises(error, match=f"^{name}: got .*, need "):
        selective_state_update(state, **(one_token(x) | wrong))
    with pytest.raises(ValueError, match=r"^state: got .*, need "):
        selective_state_update(state[:, 1:], **one_token(x))


def test_what_the_selective_scan_refuses_is_named():
    u = torch.zeros(2, 4, T)
    A, B = torch.zeros(4, N), torch.zeros(2, N, T)
    with pytest.raises(ValueError, match=r"^B: got shape \[4, 5\], need "):
        selective_scan_fn(u, u, A, A, B)
    with pytest.raises(TypeError, match=r"^delta: got int, need a Tensor"):
        selective_scan_fn(u, 3, A, B, B)
    with pytest.raises(TypeError, match=r"^return_last_state: got"):
        selective_scan_fn(u, u, A, B, B, return_last_state="yes")
