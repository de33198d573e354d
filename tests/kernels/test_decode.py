"""The decoding kernel, every gate and both rules, against the fp64 loop."""

import itertools

import pytest
import torch
from support.inputs import GATES, RULES, member_inputs
from support.kernel_judge import DEVICES, needs_memory, on_devices
from support.pairwise import parametrize_all

import fastweights as fw
from fastweights import ops
from fastweights.checks import relative_error
from fastweights.kernels.decode import decode

ALL = pytest.mark.parametrize(
    "gate, rule", list(itertools.product(GATES, RULES))
)
# Of o; the state is fp32 whatever q is.
BUDGET = {
    torch.float32: 1e-6,
    torch.float16: 5e-3,
    torch.bfloat16: 5e-3,
}
# B, T, H, HV, K, V
SHAPES = {
    "one-token": (2, 1, 2, 4, 60, 100),
    "one-value-more-than-a-tile": (1, 3, 1, 2, 128, 129),
    "eight-heads-a-group": (1, 3, 1, 8, 32, 32),
    "most-tokens": (1, 16, 2, 2, 100, 20),
    "widest-keys": (1, 3, 1, 1, 256, 64),
    "width-one": (2, 3, 1, 1, 1, 1),
}
# The interpreter adds up what a token finds one number after the other.
SMALLER = SHAPES | {
    "one-value-more-than-a-tile": (1, 2, 1, 2, 20, 33),
    "most-tokens": (1, 16, 1, 1, 20, 20),
    "widest-keys": (1, 2, 1, 1, 256, 20),
}
STRENGTHS = (0.0, -1e-3, -5.0, -10.0, -20.0)


def make_step(gate="channel", rule="delta", device="cpu", **sizes):
    """A member's inputs as decode_step takes them, all else by keyword."""
    x = {
        name: t.to(device)
        for name, t in member_inputs(gate, rule, **sizes).items()
    }
    return x | {"state": x.pop("initial_state")}


def make_shaped_step(gate, rule, shape, **options):
    sizes = dict(zip(("B", "T", "H", "HV", "K", "V"), shape, strict=True))
    return make_step(gate, rule, **sizes, **options)


def cut_token(x, t):
    """The arguments for token t alone, with the same state."""
    return {
        name: y
        if name == "state" or y.dim() == 1
        else y[:, t : t + 1].contiguous()
        for name, y in x.items()
    }


def loop_results(x):
    """Outputs and the state after them, from the loop in fp64."""
    x = {name: t.double() for name, t in x.items()}
    return fw.decode_step(**x, backend="loop"), x["state"]


def judge(x):
    """Output and state are within their budgets of the loop's."""
    ref = loop_results(x)
    with ops.record_backends() as ran:
        o = fw.decode_step(**x, backend="triton")
    assert ran == ["triton decode"]
    assert o.dtype == x["v"].dtype and x["state"].dtype == torch.float32
    errors = [
        relative_error(y, y_ref)
        for y, y_ref in zip((o, x["state"]), ref, strict=True)
    ]
    assert errors[0] <= BUDGET[o.dtype] and errors[1] <= 1e-6, errors


@parametrize_all(shape=[*SHAPES], gate=GATES, rule=RULES)
@on_devices(
    cpu=["float32", "float16"], cuda=["float32", "float16", "bfloat16"]
)
def test_the_kernel_is_the_loop(gate, rule, shape, device, dtype):
    sizes = (SMALLER if device == "cpu" else SHAPES)[shape]
    judge(make_shaped_step(gate, rule, sizes, dtype=dtype, device=device))


@parametrize_all(gate=GATES, rule=RULES, index=(torch.int32, torch.int64))
@on_devices(cpu=["float32"], cuda=["bfloat16"])
def test_rows_of_a_pool(gate, rule, index, device, dtype):
    """Three sequences whose states lie in rows 4, none and 1 of five."""
    x = make_step(
        gate, rule, device, B=3, T=2, H=1, HV=2, K=20, V=33, dtype=dtype
    )
    pool = torch.randn(5, 2, 20, 33, device=device)
    rows = torch.tensor([4, -1, 1], device=device, dtype=index)
    alone = x | {"state": pool[[4, 0, 1]].clone()}
    o_ref, S_ref = loop_results(alone)
    o_ref[1] = 0
    before = pool.clone()
    with ops.record_backends() as ran:
        o = fw.decode_step(
            **(x | {"state": pool}), rows=rows, backend="triton"
        )
    assert ran == ["triton decode"]
    assert relative_error(o, o_ref) <= BUDGET[dtype]
    assert relative_error(pool[[4, 1]], S_ref[[0, 2]]) <= 1e-6
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])


@parametrize_all(gate=GATES, rule=RULES)
@DEVICES
def test_a_state_takes_in_what_is_accepted(gate, rule, device):
    """Outputs are all tokens'; states those after 0, 1, 3 and 4 of them."""
    sizes = {"B": 4, "T": 4, "H": 1, "HV": 2, "K": 20, "V": 33}
    x = make_step(gate, rule, device, **sizes, dtype=torch.float32)
    rows, n = torch.tensor([[3, 1, 0, 4], [0, 1, 3, 4]], device=device)
    pool = torch.randn(5, 2, 20, 33, device=device)
    wanted = pool.clone()
    for b in range(4):
        one = {
            name: y[b : b + 1] if y.dim() > 1 else y for name, y in x.items()
        }
        first = {
            name: y[:, : n[b]] if y.dim() > 1 else y for name, y in one.items()
        }
        state = {"state": pool[rows[b]][None].clone()}
        if n[b]:
            _, S = loop_results(first | state)
            wanted[rows[b]] = S[0].float()
    o_ref, _ = loop_results(x | {"state": pool[rows].clone()})
    names = ("q", "k", "v", "g", "beta")
    o = decode(
        *(x.get(name) for name in names),
        *(pool, rows, 20**-0.5),
        erase_key=x.get("erase_key"),
        num_accepted=n,
    )
    assert relative_error(o, o_ref) <= 1e-6
    assert relative_error(pool, wanted) <= 1e-6
    assert pool[2].equal(wanted[2]) and pool[3].equal(wanted[3])


@DEVICES
def test_a_state_in_bf16(device):
    """Read as it is, and rounded when it is written.

    The interpreter rounds towards zero, a GPU to the nearest.
    """
    rounding = 2**-7 if device == "cpu" else 2**-8
    x = make_step(device=device, T=3, HV=2, K=20, V=33, dtype=torch.float32)
    x["state"] = x["state"].bfloat16()
    full = x | {"state": x["state"].float()}
    o_ref = fw.decode_step(**full, backend="loop")
    o = fw.decode_step(**x, backend="triton")
    assert x["state"].dtype == torch.bfloat16
    assert relative_error(o, o_ref) <= 1e-5
    step = (x["state"].float() - full["state"]).abs() / full["state"].abs()
    assert step.max() <= rounding


@parametrize_all(
    strength=STRENGTHS, gate=["fixed", "head", "channel"], rule=RULES
)
@DEVICES
def test_constant_gates(gate, rule, strength, device):
    sizes = {"T": 16, "HV": 1, "K": 32}
    if device == "cuda":
        sizes = {"T": 16, "HV": 2, "K": 64, "V": 64}
    sizes |= {"dtype": torch.float32, "strength": strength}
    judge(make_step(gate, rule, device, **sizes))


@parametrize_all(
    beta=[0.0, 1.0, 2.0], gate=GATES, covered_once=["none", "fixed"]
)
def test_identical_keys(gate, beta):
    sizes = {"T": 16, "HV": 1, "K": 32, "V": 32}
    x = make_step(gate, **sizes, dtype=torch.float32, strength=-1e-3)
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    x["beta"].fill_(beta)
    judge(x)


def test_gates_and_beta_in_the_wide_dtype():
    x = make_step(T=3, K=32, V=32, dtype=torch.float16)
    judge(x | {name: x[name].float() for name in ("g", "beta")})


def test_a_token_at_a_time_is_all_at_once():
    x = make_step(T=16, HV=2, K=20, V=20, dtype=torch.float32)
    state = x["state"].clone()
    o = fw.decode_step(**x, backend="triton")
    steps = []
    for t in range(16):
        now = cut_token(x | {"state": state}, t)
        steps.append(fw.decode_step(**now, backend="triton"))
    assert relative_error(torch.cat(steps, 1), o) <= 1e-6
    assert relative_error(state, x["state"]) <= 1e-6


@pytest.mark.parametrize("transposed", [False, True])
def test_a_view_of_a_cache_is_updated_and_nothing_else(transposed):
    """All around the state is NaN: none is read, and none overwritten."""
    x = make_step(B=2, T=3, K=33, V=33, dtype=torch.float32)
    cache = torch.full((4, 2, 33, 33), float("nan"))
    cache = cache.mT if transposed else cache
    view = cache[1:3]
    view.copy_(x["state"])
    judge(x | {"state": view})
    assert cache[::3].isnan().all()


@ALL
def test_non_contiguous_inputs(gate, rule):
    x = make_step(gate, rule, B=2, T=3, K=33, V=20, dtype=torch.float32)
    views = {
        name: t.movedim(0, -1).contiguous().movedim(-1, 0)
        for name, t in x.items()
    }
    judge(views)


def test_a_graph_that_has_saved_the_state_notices():
    x = make_step(T=2, K=8, V=8, dtype=torch.float32)
    weight = torch.ones((), requires_grad=True)
    product = (weight * x["state"]).sum()
    fw.decode_step(**x, backend="triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_operator_passes_opcheck():
    x = make_step(T=3, H=1, HV=2, K=32, V=33, dtype=torch.float32)
    operator, state = torch.ops.fastweights.decode_step.default, x.pop("state")
    given = (*x.values(), None, state, None, None, 0.5, "triton")
    torch.library.opcheck(operator, given)


@ALL
@on_devices(cpu=[], cuda=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("T", [1, 2, 16])
def test_a_model_on_gpu(gate, rule, device, dtype, T):
    shape = (4, T, 4, 8, 128, 128)
    judge(make_shaped_step(gate, rule, shape, dtype=dtype, device=device))


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize("T", [1, 16])
def test_two_runs_are_bitwise_equal_on_gpu(gate, rule, T):
    shape = (16, T, 4, 8, 128, 128)
    x = make_shaped_step(
        gate, rule, shape, dtype=torch.bfloat16, device="cuda"
    )
    runs = []
    for _ in range(2):
        state = x["state"].clone()
        with ops.record_backends() as ran:
            o = fw.decode_step(**x | {"state": state})
        assert ran == ["triton decode"]  # what "auto" is on this GPU
        runs.append((o, state))
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))


@pytest.mark.gpu
def test_fp64_is_the_loop_on_gpu():
    x = make_step(T=2, device="cuda")
    with ops.record_backends() as ran:
        fw.decode_step(**x)
    assert ran == ["torch decode"]


@pytest.mark.gpu
@ALL
def test_a_captured_step_decodes_token_after_token(gate, rule):
    """A captured step decodes token after token, into the same state."""
    sizes = {"B": 2, "H": 1, "HV": 2, "K": 128, "V": 64}
    x = make_step(gate, rule, "cuda", T=5, dtype=torch.bfloat16, **sizes)
    o_ref, state_ref = loop_results(x)

    now = {name: y.clone() for name, y in cut_token(x, 0).items()}
    fw.decode_step(**now)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fw.decode_step(**now)
    now["state"].copy_(x["state"])
    outputs = []
    for t in range(5):
        for name, y in cut_token(x, t).items():
            if name != "state":
                now[name].copy_(y)
        graph.replay()
        outputs.append(o.clone())
    assert relative_error(torch.cat(outputs, 1), o_ref) <= 5e-3
    assert relative_error(now["state"], state_ref) <= 1e-6


@pytest.mark.gpu
@ALL
def test_steps_that_follow_in_one_cuda_graph(gate, rule, monkeypatch):
    """None reads the state before the one before it has written that."""
    monkeypatch.undo()  # empty_is_nan's fills come between the steps
    steps, sizes = 12, {"B": 2, "H": 1, "HV": 2, "K": 128, "V": 128}
    x = make_step(gate, rule, "cuda", T=steps, dtype=torch.bfloat16, **sizes)
    tokens = [cut_token(x, t) for t in range(steps)]  # no copy between steps
    start, outputs_ref = x["state"].clone(), []
    for now in tokens:
        outputs_ref.append(fw.decode_step(**now))
        torch.cuda.synchronize()
    state_ref = x["state"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [fw.decode_step(**now) for now in tokens]
    x["state"].copy_(start)
    graph.replay()
    assert torch.equal(torch.cat(outputs, 1), torch.cat(outputs_ref, 1))
    assert torch.equal(x["state"], state_ref)


@pytest.mark.gpu
@needs_memory(24)
def test_offsets_past_2_to_the_31():
    """State, v and o have more elements than 32 bits can count."""
    B, T, HV, K, V = 4, 16, 65_600, 16, 512
    assert B * HV * K * V > 2**31 and B * T * HV * V > 2**31
    small = make_step("head", B=B, T=T, HV=1, K=K, V=V, dtype=torch.bfloat16)
    x = {name: t.cuda() for name, t in small.items()}
    for name in ("v", "g", "beta"):
        x[name] = x[name].repeat_interleave(HV, dim=2)
    x["state"] = x["state"].repeat_interleave(HV, dim=1)
    x["v"][:, :, -1] *= 2
    x["state"][:, -1] *= 2
    o_ref, state_ref = loop_results(small)
    o = fw.decode_step(**x, backend="triton")
    for head, size in ((0, 1), (HV // 2, 1), (HV - 1, 2)):
        errors = (
            relative_error(o[:, :, head : head + 1], size * o_ref),
            relative_error(x["state"][:, head : head + 1], size * state_ref),
        )
        assert errors[0] <= 5e-3 and errors[1] <= 1e-6, (head, errors)
