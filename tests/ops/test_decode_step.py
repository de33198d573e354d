"""decode_step in PyTorch: its equations, its state in place, its refusals."""

import contextlib
import functools
import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from support.graphs import in_one_graph
from support.inputs import GATES, RULES, explicit, member_inputs
from support.refused import refused
from torch._subclasses import FakeTensor, FakeTensorMode

import fastweights as fw
from fastweights import feature_maps, ops
from fastweights.checks import relative_error
from fastweights.ops import decode

EXACT = 1e-12  # fp64, sums in another order
OPERATOR = torch.ops.fastweights.decode_step.default

members = pytest.mark.parametrize(
    ("gate", "rule"),
    list(itertools.product(GATES, RULES)),
    ids=lambda value: value,
)


def make_step(gate="channel", rule="delta", **sizes):
    """A member's inputs as decode_step takes them, all else by keyword."""
    x = member_inputs(gate, rule, **sizes)
    return x | {"state": x.pop("initial_state")}


def widen(x):
    return {name: t.double() for name, t in x.items()}


def reference_results(x, **options):
    """Outputs and the state after them, from the equations, in fp64."""
    x = widen(x)
    return explicit(**x | {"initial_state": x.pop("state")}, **options)


def cut_tokens(x, tokens):
    """Those tokens of a member's inputs; a fixed gate has none."""
    return {n: t if t.dim() == 1 else t[:, tokens] for n, t in x.items()}


@members
@pytest.mark.parametrize("T", [1, 3, 16])
@pytest.mark.parametrize("backend", ["auto", "loop", "torch"])
def test_every_member_and_length(gate, rule, T, backend):
    x = make_step(gate, rule, B=2, T=T, H=2, HV=6)
    o_ref, state_ref = reference_results(x)
    state = x["state"].clone()
    before = {name: t.clone() for name, t in x.items() if name != "state"}
    with ops.record_backends() as ran:
        o = fw.decode_step(**x, backend=backend)
    chosen = "torch" if backend == "auto" else backend
    assert ran == [f"{chosen} decode"]
    assert o.shape == x["v"].shape
    assert not x["state"].equal(state)
    assert relative_error(o, o_ref) <= EXACT
    assert relative_error(x["state"], state_ref) <= EXACT
    assert all(x[name].equal(t) for name, t in before.items())


@members
@pytest.mark.parametrize("step", [1, 3, 16])
def test_prefill_then_decode_is_one_long_prefill(gate, rule, step):
    x = member_inputs(gate, rule, B=2, T=80)
    state = x.pop("initial_state")
    o_ref, state_ref = fw.linear_recurrence(**x, initial_state=state)
    prompt = cut_tokens(x, slice(0, 48))
    o, state = fw.linear_recurrence(**prompt, initial_state=state)
    outputs = [o]
    for t in range(48, 80, step):
        tokens = cut_tokens(x, slice(t, t + step))
        outputs.append(fw.decode_step(**tokens, state=state))
    assert relative_error(torch.cat(outputs, 1), o_ref) <= EXACT
    assert relative_error(state, state_ref) <= EXACT


@members
@pytest.mark.parametrize("rows", [None, [4, 1, 2, 0], [4, -1, 2, 0]])
def test_a_state_takes_in_what_is_accepted(gate, rule, rows):
    """Outputs of all tokens; the state after the first of each sequence."""
    x = make_step(gate, rule, B=4, T=5, H=2, HV=4)
    counts, start = torch.tensor([2, 0, 5, 1]), x.pop("state")
    o_ref, _ = reference_results(x | {"state": start})
    state, options = start.clone(), {}
    if rows is not None:
        options = {"rows": torch.tensor(rows)}
        state = torch.randn(6, *start.shape[1:]).to(start)
        state[rows] = start
        state[-1] = 0
    before = state.clone()
    o = fw.decode_step(**x, state=state, num_accepted=counts.int(), **options)
    for b, n in enumerate(counts.tolist()):
        row = b if rows is None else rows[b]
        if row < 0:
            assert not o[b].any()
            continue
        assert relative_error(o[b], o_ref[b]) <= EXACT
        wanted, now = before[row : row + 1], state[row].clone()
        state[row] = before[row]
        if n:
            own = {k: t if t.dim() == 1 else t[b, None] for k, t in x.items()}
            fw.decode_step(**cut_tokens(own, slice(0, n)), state=wanted)
        assert relative_error(now, wanted[0]) <= EXACT
    others = [i for i in range(len(state)) if rows and i not in rows]
    assert state[others].equal(before[others])


# What each member is called with, after q, k and v.
MEMBERS = {
    "linear_attention": {"feature_map": feature_maps.elu1},
    "retention": {},
    "mamba2": {"g": "head"},
    "gated_retention": {"logits": "head", "temperature": 8.0},
    "gla": {"g": "channel"},
    "deltanet": {"beta": "head"},
    "gated_deltanet": {"g": "head", "beta": "head"},
    "kda": {"g": "channel", "beta": "head"},
    "gated_deltanet2": {"g": "channel", "b": "key", "w": "value"},
    "comba": {"g": "head", "beta": "head", "p": "channel"},
}


def documented():
    """The lines of decode_step's table: members, and what they pass."""
    line = r"^ {8}(\w+) {2,}(\w.*)$"
    return dict(re.findall(line, fw.decode_step.__doc__, re.M))


@pytest.mark.parametrize("name", MEMBERS)
def test_the_table_says_what_each_member_passes(name):
    """Each line of it continues what the member has begun."""
    x = member_inputs("channel", "delta", B=2, T=12, H=2, HV=4)
    x["logits"] = torch.randn(2, 12, 4, dtype=torch.float64)
    x |= {"b": torch.rand_like(x["k"]), "w": torch.rand_like(x["v"])}
    x["p"] = torch.rand_like(x["g"]) * x["k"].repeat_interleave(2, 2)
    if MEMBERS[name].get("g") == "head":
        x["g"] = x["g"][..., 0]
    extra = {
        key: x[key] if isinstance(value, str) else value
        for key, value in MEMBERS[name].items()
    }
    given = {key: x[key] for key in "qkv"} | extra
    whole, last = getattr(fw, name)(**given)
    _, state = getattr(fw, name)(
        **{n: t[:, :9] if n in x else t for n, t in given.items()}
    )
    step = f"decode_step({documented()[name]}, state=state)"
    words = {
        "HV": 4,
        "decode_step": fw.decode_step,
        "exp": torch.exp,
        "logsigmoid": F.logsigmoid,
        "phi": feature_maps.elu1,
        "retnet_log_decay": functools.partial(
            fw.retnet_log_decay, dtype=torch.float64
        ),
        "state": state,
        "temperature": extra.get("temperature"),
    }
    for t in range(9, 12):
        token = {n: x[n][:, t : t + 1] for n in given if n in x}
        more = {f"{n}_": x[..., None] for n, x in token.items()}
        o = eval(step, words | token | more)
        assert relative_error(o, whole[:, t : t + 1]) <= EXACT
    assert relative_error(state, last) <= EXACT


def test_the_table_has_every_member_once():
    assert documented().keys() == MEMBERS.keys()


def test_what_is_computed_outside_has_its_steps_named():
    assert "fastweights.serving" in fw.decode_step.__doc__


@members
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype(gate, rule, dtype):
    x = make_step(gate, rule, T=16, K=32, V=33, dtype=getattr(torch, dtype))
    o_ref, state_ref = reference_results(x)
    o = fw.decode_step(**x)
    assert o.dtype == x["v"].dtype and x["state"].dtype == torch.float32
    assert relative_error(o, o_ref) <= (1e-6 if dtype == "float32" else 5e-3)
    assert relative_error(x["state"], state_ref) <= 1e-6


@pytest.mark.parametrize("scale", [None, 2, 0.1, 0.0])
def test_any_scale_is_the_definitions(scale):
    x = make_step("head")
    x = {n: t if n == "state" else t[:, :5] for n, t in x.items()}
    o_ref, _ = reference_results(x, scale=scale and float(scale))
    assert relative_error(fw.decode_step(**x, scale=scale), o_ref) <= EXACT


def slots(cache):
    return cache[1:3]


def every_other_head(cache):
    return cache[:2, ::2]


def transposed(cache):
    return cache.mT[:2, :3]


def heads_last(cache):
    return cache.movedim(-1, 1)[:2, :3]


VIEWS = [slots, every_other_head, transposed, heads_last]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_cache_is_updated_and_nothing_else(view):
    """The caller's own memory changes, however it lies."""
    x = make_step(B=2, T=4, H=1, HV=3, K=6, V=6)
    cache = torch.randn(4, 6, 6, 6, dtype=torch.float64)
    before, x["state"] = cache.clone(), view(cache)[:, :3]
    o_ref, state_ref = reference_results(x)
    assert relative_error(fw.decode_step(**x), o_ref) <= EXACT
    assert relative_error(view(cache)[:, :3], state_ref) <= EXACT
    view(cache)[:, :3] = view(before)[:, :3]
    assert cache.equal(before)


def test_inputs_need_not_be_contiguous():
    x = make_step(B=2, T=5, H=2, HV=4)
    views = {
        n: t.movedim(0, -1).contiguous().movedim(-1, 0) for n, t in x.items()
    }
    assert not any(t.is_contiguous() for t in views.values())
    o = fw.decode_step(**views)
    assert o.equal(fw.decode_step(**x))
    assert views["state"].equal(x["state"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_autocast_narrows_q_k_v_and_nothing_else(dtype):
    dtype = getattr(torch, dtype)
    products = dtype if dtype == torch.float64 else torch.bfloat16
    x = make_step(T=7, dtype=torch.float32)
    names = x if dtype == torch.float64 else ("q", "k", "v")
    x |= {name: x[name].to(dtype) for name in names}
    by_hand = {name: t.clone() for name, t in x.items()}
    by_hand |= {name: x[name].to(products) for name in ("q", "k", "v")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = fw.decode_step(**x)
    assert o.dtype == products
    assert o.equal(fw.decode_step(**by_hand))
    assert x["state"].equal(by_hand["state"])


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
def test_it_refuses_where_a_gradient_is_needed(name):
    x = make_step(T=2)
    x[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: .*torch\.no_grad\(\)"):
        fw.decode_step(**x)
    before = x["state"].detach().clone()
    with torch.no_grad():
        o = fw.decode_step(**x)
    assert not o.requires_grad and not x["state"].equal(before)


@pytest.mark.parametrize("profiled", [False, True])
def test_a_state_of_inference_mode_goes_on_outside_of_it(profiled):
    """Updated in place; the outputs are like any other."""
    x = make_step(T=2)
    ref = x["state"].clone()
    o_ref = fw.decode_step(**x | {"state": ref})
    with torch.inference_mode():
        state = x["state"].clone()
    with torch.profiler.profile() if profiled else contextlib.nullcontext():
        o = fw.decode_step(**x | {"state": state})
    assert o.equal(o_ref) and state.equal(ref)
    assert state.is_inference() and not o.is_inference()


def test_a_graph_that_has_saved_the_state_notices(monkeypatch):
    """A kernel writes behind PyTorch's back: here as numpy."""

    def write(q, k, v, g, beta, erase_key, state, *others):
        state.numpy()[...] = 0.0
        return v

    monkeypatch.setattr(decode, "_decode", write)
    x = make_step(T=2)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    read = (weight * x["state"]).sum()
    with torch.no_grad():
        fw.decode_step(**x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        read.backward()


@pytest.mark.parametrize("name", ["g", "beta"])
def test_gates_and_rates_go_by_name(name):
    """By position deltanet's beta would pass for mamba2's g."""
    x = make_step("head", T=2)
    q, k, v, state = (x[n] for n in ("q", "k", "v", "state"))
    before = state.clone()
    with pytest.raises(TypeError, match="takes 3 positional arguments"):
        fw.decode_step(q, k, v, x[name], state=state)
    assert state.equal(before)


def test_what_looks_at_operators_sees_it():
    x = make_step(T=2)
    expected = fw.decode_step(**x | {"state": x["state"].clone()})
    with torch.profiler.profile() as profile:
        state = x["state"].clone()
        assert fw.decode_step(**x | {"state": state}).equal(expected)
    names = [event.key for event in profile.key_averages()]
    assert "fastweights::decode_step" in names
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in x.items()}
        assert isinstance(fw.decode_step(**fake), FakeTensor)
    with pytest.raises(RuntimeError, match=r"vmap|Batching"):
        torch.func.vmap(lambda q: fw.decode_step(**x | {"q": q}))(x["q"][None])


@members
def test_operator_passes_opcheck(gate, rule):
    x = make_step(gate, rule, T=3, H=2, HV=4, dtype=torch.float32)
    state = x["state"].mT.contiguous().mT
    named = map(x.get, ("q", "k", "v", "g", "beta", "erase_key"))
    torch.library.opcheck(OPERATOR, (*named, state, None, None, 0.5, "auto"))


class Layer(torch.nn.Module):
    """Kimi Delta Attention behind its projection, a token at a time."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.project = torch.nn.Linear(width, 4 * width + heads)

    def forward(self, x, state):
        y, beta = self.project(x).tensor_split([-self.heads], dim=-1)
        q, k, v, g = y.unflatten(-1, (self.heads, -1)).chunk(4, dim=-1)
        k, g = F.normalize(k, dim=-1), F.logsigmoid(g)
        o = fw.decode_step(q, k, v, g=g, beta=beta.sigmoid(), state=state)
        return x + o.flatten(2)


def test_one_graph_decodes_every_token():
    torch.manual_seed(0)
    layer, (ref, state) = Layer(), torch.zeros(2, 1, 2, 4, 4)
    with torch.no_grad(), in_one_graph(layer) as compiled:
        x = x_ref = torch.randn(1, 1, 8)
        for _ in range(5):
            x, x_ref = compiled(x, state), layer(x_ref, ref)
    torch.testing.assert_close((x, state), (x_ref, ref))


def test_one_graph_for_several_numbers_of_tokens():
    with in_one_graph(fw.decode_step) as compiled:
        for T in (2, 5, 16):
            x = make_step(T=T)
            o_ref, state_ref = reference_results(x)
            for name in ("q", "k", "v", "g", "beta"):
                torch._dynamo.mark_dynamic(x[name], 1)
            assert relative_error(compiled(**x), o_ref) <= EXACT
            assert relative_error(x["state"], state_ref) <= EXACT


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def tokens(T):
    return {
        "q": ones(1, T, 2, 3),
        "k": ones(1, T, 2, 3),
        "v": ones(1, T, 4, 5),
        "g": None,
        "beta": None,
    }


def off_by(half_life, delta):
    """What a state in bf16 costs: relative, of the last half's outputs.

    One token per call, keys of unit length, K = V = 64, over 8 half-lives.
    """
    torch.manual_seed(0)
    T = 8 * half_life
    x = {name: torch.randn(1, T, 2, 64) for name in ("q", "k", "v")}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x["g"] = torch.full((1, T, 2), -math.log(2) / half_life)
    if delta:
        x["beta"] = torch.rand(1, T, 2)
    states = {dtype: torch.zeros(1, 2, 64, 64) for dtype in ("wide", "bf16")}
    states["bf16"] = states["bf16"].bfloat16()
    outputs = {
        name: torch.cat(
            [
                fw.decode_step(
                    **{n: y[:, t : t + 1] for n, y in x.items()}, state=S
                )
                for t in range(T)
            ],
            1,
        )[:, T // 2 :]
        for name, S in states.items()
    }
    assert states["bf16"].dtype == torch.bfloat16
    return relative_error(outputs["bf16"], outputs["wide"])


@pytest.mark.parametrize(
    "half_life, delta, least, most",
    [
        (10, False, 0.003, 0.006),
        (10, True, 0.003, 0.006),
        (100, False, 0.01, 0.018),
        (100, True, 0.008, 0.014),
        pytest.param(1000, False, 0.04, 0.07, marks=pytest.mark.full),
        pytest.param(1000, True, 0.01, 0.02, marks=pytest.mark.full),
    ],
)
def test_what_a_state_in_bf16_costs(half_life, delta, least, most):
    assert least < off_by(half_life, delta) < most


@pytest.mark.parametrize("half_life, forgets", [(400, False), (170, True)])
def test_a_state_in_bf16_may_forget_nothing(half_life, forgets):
    """Where nothing is written and a gate takes less than half a bit."""
    zero = torch.zeros(1, 1, 1, 8)
    state = torch.ones(1, 1, 8, 8, dtype=torch.bfloat16)
    g = torch.full((1, 1, 1), -math.log(2) / half_life)
    for _ in range(half_life):
        fw.decode_step(zero, zero, zero, g=g, state=state)
    assert (state.max() < 0.9) == forgets
    assert forgets or state.eq(1).all()


def test_rows_of_a_pool_in_bf16():
    """Each is rounded once, and the others are as they were."""
    x = make_step("channel", T=3, dtype=torch.bfloat16)
    pool = torch.randn(4, *x["state"].shape[1:]).bfloat16()
    rows = torch.tensor([2, 0])[: len(x["q"])]
    alone = {**x, "state": pool[rows].float()}
    want = fw.decode_step(**alone)
    before = pool.clone()
    got = fw.decode_step(**{**x, "state": pool}, rows=rows)
    assert torch.equal(got, want)
    assert torch.equal(pool[rows], alone["state"].bfloat16())
    others = [n for n in range(4) if n not in rows.tolist()]
    assert torch.equal(pool[others], before[others])


# What is changed in a call that is right, and its error. The call has B 1,
# T 6, H 2, HV 4, K 3, V 5. ops/test_recurrence.py has what both refuse.
REFUSED = """
state=None
    TypeError: state: got NoneType, need a Tensor
state=[0.0]
    TypeError: state: got list, need a Tensor
state=ones(1, 4, 3, 5, dtype=torch.float16)
    TypeError: state: got torch.float16, need torch.float32 or torch.bfloat16
state=ones(1, 4, 3, 5, dtype=torch.float64)
    TypeError: state: got torch.float64, need torch.float32 or torch.bfloat16
{n: ones(1, 6, 2, 3).double() for n in "qk"} | {"v": ones(1, 6, 4, 5).double()}
| {"g": None, "beta": None, "state": ones(1, 4, 3, 5).bfloat16()}
    TypeError: state: got torch.bfloat16, need torch.float64
state=ones(1, 4, 5, 3)
    ValueError: state: got shape [1, 4, 5, 3], need [1, 4, 3, 5]
state=ones(2, 4, 3, 5)
    ValueError: state: got shape [2, 4, 3, 5], need [1, 4, 3, 5]
state=torch.zeros(1, 4, 3, 5, device="meta")
    ValueError: state: got device meta, need q's, cpu
state=ones(3, 5).expand(1, 4, 3, 5)
    ValueError: state: got strides [0, 0, 5, 1], need a tensor whose elements
    share no memory, such as its clone()
state=ones(99).as_strided((1, 4, 3, 5), (60, 12, 4, 1))
    ValueError: state: got strides [60, 12, 4, 1], need a tensor whose elements
    share no memory, such as its clone()
state=ones(99).as_strided((1, 4, 3, 5), (60, 15, 1, 2))
    ValueError: state: got strides [60, 15, 1, 2], need a tensor whose elements
    share no memory, such as its clone()
tokens(17)
    ValueError: q: got shape [1, 17, 2, 3], need [B, T, H, K] with T <= 16; for
    more tokens there is linear_recurrence
tokens(0)
    ValueError: q: got shape [1, 0, 2, 3], need [B, T, H, K] with B, T, H, K
num_accepted=[1]
    TypeError: num_accepted: got list, need a Tensor
num_accepted=torch.tensor([1.0])
    TypeError: num_accepted: got torch.float32, need torch.int32 or torch.int64
num_accepted=torch.tensor([[1]])
    ValueError: num_accepted: got shape [1, 1], need [1]
num_accepted=torch.tensor([7])
    ValueError: num_accepted: got [7], need 0 to 6
num_accepted=torch.tensor([-1])
    ValueError: num_accepted: got [-1], need 0 to 6
num_accepted=torch.tensor([1], device="meta")
    ValueError: num_accepted: got device meta, need q's, cpu
backend="triton"
    ValueError: backend: got 'triton', which needs tensors on a CUDA device,
    not cpu, or Triton's interpreter (TRITON_INTERPRET=1 before Triton's first
{name: ones(1, 6, 2, 3, dtype=torch.float64) for name in ("q", "k")} | {"v":
ones(1, 6, 4, 5, dtype=torch.float64)} | {"state": ones(1, 4, 3, 5,
dtype=torch.float64)} | {"g": None, "beta": None, "backend": "triton"}
    ValueError: backend: got 'triton', which needs tensors in float32,
    float16 or bfloat16, not float64
"""


@refused(REFUSED)
def test_bad_calls_name_the_argument_and_what_it_needs(wrong, error):
    if "triton" in wrong:
        pytest.importorskip("triton")
    x = make_step("head", T=6, H=2, HV=4, K=3, dtype=torch.float32)
    state = x["state"].clone()
    with error():
        fw.decode_step(**x | eval(f"dict({wrong})"))
    assert x["state"].equal(state)
