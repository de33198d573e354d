"""Steps in place beside the whole sequence, and pools of states."""

import pytest
import torch
import torch.nn.functional as F
from support.inputs import member_inputs

import fastweights as fw
from fastweights import feature_maps
from fastweights.checks import relative_error
from fastweights.ops.mlstm import mlstm_step
from fastweights.ops.normaliser import linear_attention_step
from fastweights.ops.selective import selective_step

EXACT = 1e-12
double = {"dtype": torch.float64}


def mlstm():
    """Inputs, the whole, a step, an empty state; a gate of -inf among them."""
    x = member_inputs("head", "additive", B=3, T=13, H=2, HV=4, K=6, V=5)
    del x["initial_state"]
    x["i"] = 3 * torch.randn(3, 13, 4, **double)
    x["i"][:, 0, 1] = x["i"][:, 7, 2] = x["g"][:, 9, 3] = -torch.inf
    empty = (
        torch.zeros(3, 4, 6, 6, **double),
        torch.full((3, 4), -torch.inf, **double),
    )
    return x, fw.mlstm, mlstm_step, empty


def normalised():
    x = member_inputs("none", "additive", B=3, T=13, H=2, HV=4, K=6, V=5)
    del x["initial_state"]
    options = {"feature_map": feature_maps.elu1, "eps": 1e-3}

    def whole(**x):
        return fw.linear_attention(**x, normalize=True, **options)

    def step(**x):
        return linear_attention_step(**x, **options)

    return x, whole, step, (torch.zeros(3, 4, 6, 6, **double),)


def selective(G):
    D, N = 8, 5
    x = {name: torch.randn(3, 13, D, **double) for name in ("x", "dt", "z")}
    x |= {name: torch.randn(3, 13, G, N, **double) for name in "BC"}
    once = {
        "A": -torch.rand(D, N, **double),
        "D": torch.randn(D, **double),
        "dt_bias": torch.randn(D, **double),
        "dt_softplus": True,
    }

    def whole(**x):
        return fw.selective_scan(**x, **once)

    def step(**x):
        return selective_step(**x, **once)

    return x, whole, step, (torch.zeros(3, D, N, **double),)


def delta():
    x = member_inputs("channel", "delta", B=3, T=13, H=2, HV=4, K=6, V=5)
    empty = torch.zeros_like(x.pop("initial_state"))
    return x, fw.linear_recurrence, fw.decode_step, (empty,)


CASES = {
    "delta": delta,
    "mlstm": mlstm,
    "normalised": normalised,
    "selective": lambda: selective(1),
    "selective-groups": lambda: selective(2),
}


def as_argument(state):
    """As a step takes it: one tensor, or a pair."""
    return state if len(state) > 1 else state[0]


def after(last):
    return last if isinstance(last, tuple) else (last,)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pieces", [[1] * 13, [9, 1, 3], [3, 9, 1]], ids=str)
def test_steps_are_the_whole(case, pieces):
    """Each changes the state that it is given, to the one of the whole."""
    torch.manual_seed(0)
    x, whole, step, state = CASES[case]()
    o_ref, last = whole(**x)
    outputs, t = [], 0
    for n in pieces:
        token = {name: y[:, t : t + n] for name, y in x.items()}
        outputs.append(step(**token, state=as_argument(state)))
        t += n
    assert relative_error(torch.cat(outputs, 1), o_ref) < EXACT
    for S, S_ref in zip(state, after(last), strict=True):
        assert relative_error(S, S_ref) < EXACT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "index, none", [(torch.int32, -1), (torch.int64, 6), (torch.int64, 99)]
)
def test_steps_in_a_pool(case, index, none):
    """Rows of a pool, one sequence with none; other rows stay."""
    torch.manual_seed(0)
    x, _, step, state = CASES[case]()
    alone = tuple(S.clone() for S in state)
    pool = tuple(S.new_full((6, *S.shape[1:]), 7.0) for S in state)
    rows = torch.tensor([5, none, 2], dtype=index)
    for P, S in zip(pool, state, strict=True):
        P[rows[0]], P[rows[2]] = S[0], S[2]
    for t in range(0, 12, 2):
        token = {name: y[:, t : t + 2] for name, y in x.items()}
        o_ref = step(**token, state=as_argument(alone))
        o = step(**token, state=as_argument(pool), rows=rows)
        assert relative_error(o[[0, 2]], o_ref[[0, 2]]) < EXACT
        if case != "mlstm":
            assert not o[1].any()
    for P, S in zip(pool, alone, strict=True):
        assert relative_error(P[[5, 2]], S[[0, 2]]) < EXACT
        assert (P[[0, 1, 3, 4]] == 7).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("in_rows", [False, True])
def test_states_of_inference_mode_go_on_outside_of_it(case, in_rows):
    torch.manual_seed(0)
    x, _, step, state = CASES[case]()
    token = {name: y[:, :2] for name, y in x.items()}
    rows = {"rows": torch.arange(3)} if in_rows else {}
    with torch.inference_mode():
        inside = tuple(S.clone() for S in state)
    o_ref = step(**token, state=as_argument(state), **rows)
    o = step(**token, state=as_argument(inside), **rows)
    assert torch.equal(o, o_ref) and not o.is_inference()
    assert all(map(torch.equal, inside, state))


@pytest.mark.parametrize("in_rows", [False, True])
def test_an_empty_state_of_mlstm_is_cleared(in_rows):
    """Whatever stands in it: an m of -inf says that there is nothing."""
    torch.manual_seed(0)
    x, _, step, (S, m) = mlstm()
    token = {name: y[:, :2] for name, y in x.items()}
    rows = {"rows": torch.arange(3)} if in_rows else {}
    left = (torch.full_like(S, 7.0), m.clone())
    o = step(**token, state=left, **rows)
    assert torch.equal(o, step(**token, state=(S, m), **rows))
    assert torch.equal(left[0], S) and torch.equal(left[1], m)


def refusals():
    """Steps with one argument that does not fit, and what is said."""
    S, m = torch.zeros(3, 4, 6, 6, **double), torch.zeros(3, 4, **double)
    pool = torch.zeros(5, 4, 6, 6, **double), torch.zeros(5, 4, **double)
    h, rows = torch.zeros(3, 8, 5, **double), torch.arange(3)
    twice, floats = torch.tensor([0, 1, 1]), torch.arange(3.0)
    each = {
        "delta": [
            ({"state": S[..., :5], "rows": rows[:2]}, r"rows: got shape \[2"),
            ({"state": S[..., :5], "rows": floats}, r"rows: got torch\.floa"),
            ({"state": S[..., :5], "rows": [0, 1, 2]}, "rows: got list, need"),
            ({"state": S[..., :5], "rows": twice}, r"rows: got \[0, 1, 1\], "),
            ({"state": pool[0], "rows": rows}, r"state: got shape \[5, 4, 6"),
        ],
        "mlstm": [
            ({"state": None}, "state: got NoneType, need a pair"),
            ({"state": S}, "state: got Tensor, need a pair"),
            ({"state": (S, 3)}, r"state\[1\]: got int, need a Tensor"),
            ({"state": (S, m[:2])}, r"state\[1\]: got shape \[2, 4\]"),
            ({"state": (S, m[:, :2])}, r"state\[1\]: got shape \[3, 2\]"),
            ({"state": (S[..., :5], m)}, r"state\[0\]: got shape \[3, 4"),
            ({"state": (S, m.float())}, r"state\[1\]: got torch\.float32"),
            ({"state": (pool[0], m), "rows": rows}, r"state\[1\]: got sha"),
            ({"state": pool, "rows": [0, 1, 2]}, "rows: got list, need a T"),
            ({"state": pool, "rows": twice}, r"rows: got \[0, 1, 1\], need"),
            ({"state": pool, "rows": floats}, r"rows: got torch\.float32"),
        ],
        "normalised": [
            ({"state": None}, "state: got NoneType, need a Tensor"),
            ({"state": S[..., :5]}, r"state: got shape \[3, 4, 6, 5\], nee"),
            ({"state": pool[0], "rows": twice}, r"rows: got \[0, 1, 1\], n"),
        ],
        "selective": [
            ({"state": None}, "state: got NoneType, need a Tensor"),
            ({"state": h[..., :4]}, r"state: got shape \[3, 8, 4\], need"),
            ({"state": h.half()}, r"state: got torch\.float16, need torch"),
            ({"state": h[..., :4], "rows": rows}, r"state: got shape \[3, 8"),
            ({"state": h.half(), "rows": rows}, r"state: got torch\.float1"),
            ({"state": h, "rows": rows[:2]}, r"rows: got shape \[2\], need"),
            ({"state": h, "rows": floats}, r"rows: got torch\.float32, nee"),
            ({"state": h, "rows": twice}, r"rows: got \[0, 1, 1\], need ea"),
        ],
    }
    return [(case, *of) for case, some in each.items() for of in some]


@pytest.mark.parametrize("case, given, said", refusals())
def test_states_and_rows_that_do_not_fit(case, given, said):
    """Told by the name that they have here, before anything changes."""
    x, _, step, _ = CASES[case]()
    token = {name: y[:, :2] for name, y in x.items()}
    with pytest.raises((TypeError, ValueError), match=f"^{said}"):
        step(**token, **given)


@pytest.mark.parametrize("case", CASES)
def test_steps_refuse_where_a_gradient_is_needed(case):
    """By the name of what needs one, before the state changes."""
    torch.manual_seed(0)
    x, _, step, state = CASES[case]()
    token = {name: y[:, :2] for name, y in x.items()}
    before = [S.clone() for S in state]
    names = ["state"] if len(state) == 1 else [r"state\[0\]", r"state\[1\]"]
    given = [*token.items(), *zip(names, state, strict=True)]
    for name, y in given:
        y.requires_grad_()
        said = f"^{name}: got a tensor that requires a gradient"
        with pytest.raises(ValueError, match=said):
            step(**token, state=as_argument(state))
        y.requires_grad_(False)
        assert all(map(torch.equal, state, before))
    given[0][1].requires_grad_()
    with torch.no_grad():
        assert not step(**token, state=as_argument(state)).requires_grad
    assert not state[0].equal(before[0])


def test_selective_step_refuses_a_gradient_of_what_has_no_tokens():
    x, _, _, (state,) = selective(1)
    token = {name: y[:, :2] for name, y in x.items()}
    once = {"A": torch.rand(8, 5, **double)}
    once |= {name: torch.rand(8, **double) for name in ("D", "dt_bias")}
    for name, y in once.items():
        wrong = once | {name: y.clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"^{name}: got a tensor that"):
            selective_step(**token, **wrong, state=state)


def test_a_step_refuses_a_feature_map_that_learns():
    x, _, _, (state,) = normalised()
    token = {name: y[:, :2] for name, y in x.items()}
    phi = torch.nn.Linear(6, 6, **double)
    with pytest.raises(ValueError, match=r"^q: got a tensor that"):
        linear_attention_step(**token, state=state, feature_map=phi)


def test_mlstms_state_may_be_narrow_but_not_its_units():
    torch.manual_seed(0)
    x, _, step, state = mlstm()
    token = {name: y[:, :2].float() for name, y in x.items()}
    S, m = (y.float() for y in state)
    narrow = S.bfloat16()
    with pytest.raises(TypeError, match=r"state\[1\]: got torch\.bfloat16"):
        step(**token, state=(narrow, m.bfloat16()))
    left = (narrow, m.clone())
    o = [step(**token, state=given) for given in ((S, m), left, (S, m), left)]
    assert torch.equal(o[0], o[1]) and relative_error(o[3], o[2]) < 0.02


def test_steps_refuse_what_is_no_function_no_flag_and_no_few_tokens():
    x, *_ = normalised()
    with pytest.raises(TypeError, match="feature_map: got str, need a funct"):
        linear_attention_step(**x, state=None, feature_map="elu")
    with pytest.raises(TypeError, match="feature_map: got str, need a funct"):
        fw.linear_attention(x["q"], x["k"], x["v"], feature_map="elu")
    x, _, step, (state,) = selective(1)
    x = {name: torch.cat([y, y], 1) for name, y in x.items()}
    with pytest.raises(ValueError, match=r"x: got shape .*T <= 16"):
        step(**x, state=state)
    del x["z"]
    with pytest.raises(TypeError, match="dt_softplus: got 'yes', need True"):
        A = -torch.rand(8, 5, **double)
        selective_step(**x, A=A, state=state, dt_softplus="yes")


def test_no_row_at_all_writes_nothing():
    x, _, step, (pool,) = delta()
    token = {name: y[:, :2] for name, y in x.items()}
    rows = torch.tensor([-7, 99, -1])
    assert not step(**token, state=pool, rows=rows).any() and not pool.any()


@pytest.mark.parametrize("case", ["mlstm", "selective"])
def test_a_step_compiles_whole(case):
    torch.manual_seed(0)
    x, _, step, state = CASES[case]()
    alone = tuple(S.clone() for S in state)
    token = {name: y[:, :1] for name, y in x.items()}
    rows = torch.arange(3)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        o_ref = step(**token, state=as_argument(alone))
        o = compiled(**token, state=as_argument(state), rows=rows)
        assert relative_error(o, o_ref) < EXACT
    for S, S_ref in zip(state, alone, strict=True):
        torch.testing.assert_close(S, S_ref, rtol=EXACT, atol=EXACT)


def test_half_precision_divides_in_fp32():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 20, 1, 64).bfloat16().unbind()
    q, k = q.abs(), k.abs()
    ref, _ = fw.linear_attention(
        q.double(), k.double(), v.double(), normalize=True
    )
    state = torch.zeros(2, 1, 64, 65)
    o = torch.cat(
        [
            linear_attention_step(
                q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], state=state
            )
            for t in range(20)
        ],
        1,
    )
    assert o.dtype == torch.bfloat16
    assert relative_error(o, ref) < 4e-3
    assert F.mse_loss(o.double(), ref) < 1e-3
