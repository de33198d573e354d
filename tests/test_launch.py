"""A call's plan: it takes the kernels Triton would, with what they need."""

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch

pytest.importorskip("triton")

import triton
from inputs import GATES, RULES, member
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import _allocation
from triton.runtime.jit import create_function_from_signature

import fastweights as fw
from fastweights.kernels import backend, launch
from fastweights.kernels.call import INPUTS, Call
from fastweights.kernels.plan import (
    Launch,
    Plan,
    _allocate,
    compile_together,
    places,
    sizes,
)
from fastweights.kernels.tile import INTERPRETED

RUN = Call.run
rules = pytest.mark.parametrize("rule", RULES)
compiled = pytest.mark.skipif(
    INTERPRETED, reason="the interpreter replaces the compiler"
)


def low(x):
    """The same in bf16, states in fp32."""
    return {
        name: t.float() if name == "initial_state" else t.bfloat16()
        for name, t in x.items()
    }


def specialization(kernel, arguments, constants):
    """What Triton compiles a kernel for, by its arguments."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(
        kernel.signature, kernel.params, backend
    )
    return bind(*arguments, **constants)[1]


@compiled
@rules
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_a_plan_has_the_kernels_of_the_call(gate, rule, monkeypatch):
    """All that Triton looks at is that of the tensors with data."""
    launches, cut = [], False
    monkeypatch.setattr(
        Call, "run", lambda call, *launch: launches.append(launch)
    )
    for B, T, K in itertools.product((1, 3), (1, 16, 37, 2100), (33, 64)):
        x = low(member(gate, rule, B=B, T=T, H=1, HV=3, K=K, V=40))
        ends = [(x["initial_state"], None), (None, None)]
        if B == 1:
            ends.append((None, torch.tensor([0, T // 2, T])))
        for end in ends:
            inputs = [*(x.get(name) for name in INPUTS[:5]), *end]
            call = Call(*inputs, 1.0, 64)
            cut |= call.segments > 1
            launches.clear()
            o, state, saved = launch.forward(call)
            call.others = (o, state, *saved)
            launch.backward(call)
            with monkeypatch.context() as undone:
                undone.setattr(Call, "run", RUN)
                of = sizes(inputs)
                rest = (64, o.device, "tf32")
                planned = [
                    *backend.planned(of, None, *rest).launches,
                    *backend.planned(of, sizes((o, state)), *rest).launches,
                ]
            assert len(planned) == len(launches)
            for found, expected in zip(planned, launches, strict=True):
                stage, kernel, programs, *arguments = expected
                assert programs > 0
                assert found.kernel is kernel and found.programs == programs
                constants = call.constants(stage)
                assert found.constants == constants
                now = specialization(kernel, found.arguments, constants)
                assert now == specialization(kernel, arguments, constants)
    assert cut


class Kernel:
    """In place of a jitted kernel, which it compiles to: notes its use."""

    arg_names = ("x", "y", "scale", "n", "BT", "TMA")

    def __init__(self, future=False):
        self.notes, self.future, self.fails = [], future, False

    def warmup(self, *arguments, grid, **constants):
        self.notes.append("compiled")
        if not self.future:
            return self
        done = Future()
        if self.fails:
            done.set_exception(RuntimeError("no ptxas"))
        else:
            done.set_result(self)
        return triton.FutureKernel(lambda kernel: None, done)

    def __getitem__(self, grid):
        def run(*arguments):
            self.notes.append((grid, _allocation._allocator.get(), arguments))

        return run


def two_launches(kernel, tma=False):
    """From x to y, and from there to z."""
    x, y, z = (torch.empty(n, device="meta") for n in (3, 50, 4))
    scale, constants = float("nan"), {"num_warps": 4, "BT": 16, "TMA": tma}
    launches = [
        Launch(kernel, 7, (x, y, None, 5), constants),
        Launch(kernel, 8, (y, z, scale, 6), constants),
    ]
    return Plan(launches, [[x], []], [z], None, scale)


def test_addresses_and_constants():
    kernel = Kernel()
    plan = two_launches(kernel)
    compile_together(plan)
    assert kernel.notes == ["compiled"] * 2 and not plan.runs
    plan.load()
    x = torch.ones(3)
    (z,) = plan([x, None], 0.5)
    assert z.shape == (4,) and z.dtype == torch.float32
    (first, _, (at_x, at_y, none, *one)), (then, _, others) = kernel.notes[2:]
    assert first == (7, 1, 1) and then == (8, 1, 1)
    assert at_x == x.data_ptr() and none is None and one == [5, 16, False]
    assert others == (at_y, z.data_ptr(), 0.5, 6, 16, False)
    assert plan([x, None], 2.0)[0] is not z
    assert kernel.notes[-1][2][2] == 2.0


def test_what_another_thread_compiles_is_waited_for():
    kernel = Kernel(future=True)
    plan = two_launches(kernel)
    compile_together(plan)
    plan.load()
    plan([torch.ones(3), None], 1.0)
    assert [note[0] for note in kernel.notes[2:]] == [(7, 1, 1), (8, 1, 1)]


def test_what_cannot_be_compiled_may_be_later():
    kernel = Kernel(future=True)
    plan = two_launches(kernel)
    kernel.fails = True
    compile_together(plan)
    with pytest.raises(RuntimeError, match="no ptxas"):
        plan.load()
    assert not plan.kernels and not plan.runs
    kernel.fails = False
    compile_together(plan)
    plan.load()
    plan([torch.ones(3), None], 1.0)


def test_memory_for_descriptors():
    """Ours where a kernel makes them, in any thread; the caller keeps its."""
    kernel, theirs = Kernel(), object()

    def launch(tma):
        plan = two_launches(kernel, tma)
        compile_together(plan)
        plan.load()
        plan([torch.ones(3), None], 1.0)

    def copied():
        triton.set_allocator(theirs)
        with ThreadPoolExecutor() as pool:
            pool.submit(launch, True).result()
        launch(True)
        launch(False)
        return _allocation._allocator.get()

    assert copy_context().run(copied) is theirs
    used = [note[1] for note in kernel.notes if note != "compiled"]
    assert used == [_allocate] * 4 + [theirs] * 2


def test_tensors_of_a_buffer_are_aligned():
    tensors = [torch.empty(n, dtype=torch.uint8) for n in (1, 128, 0, 129, 5)]
    assert places(tensors) == [0, 128, 256, 256, 512, 640]
    assert places([]) == [0]


def test_a_call_aligns_its_inputs():
    """Slices at any address are copied; what is aligned is not."""
    inputs = low(member("none", "additive", T=64, H=1, K=64, V=64))
    x = [inputs[name] for name in "qkv"]
    v = torch.empty(x[2].numel() + 1, dtype=x[2].dtype)[1:]
    v = v.view_as(x[2]).copy_(x[2])
    assert v.is_contiguous() and v.data_ptr() % 16
    call = Call(*x[:2], v, None, None, None, None, 1.0, 64, others=(v, None))
    assert call.q is x[0] and torch.equal(call.v, v)
    copies = (call.v, call.others[0])
    assert not any(t.data_ptr() % 16 for t in copies)
    assert call.others[1] is None and torch.equal(call.others[0], v)
    offsets = torch.tensor([0, 0, 30, 64], dtype=torch.int32)[1:]
    call = Call(*x, None, None, None, offsets, 1.0, 64)
    assert call.cu_seqlens.tolist() == [0, 30, 64]
    assert call.cu_seqlens.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    "V, BV, tma",
    [(64, 64, True), (65, 128, False), (128, 128, True), (192, 64, True)],
)
@rules
def test_no_tile_reads_the_next_head(V, BV, tma, rule):
    """A descriptor has no mask for columns: tiles are whole."""
    inputs = low(member("vector", rule, T=64, H=1, K=128, V=V))
    x = [inputs.get(name) for name in INPUTS[:5]]
    constants = Call(*x, None, None, 1.0, 64).constants("scan_backward")
    assert constants["TMA"] is tma
    assert constants["BV"] == BV


@pytest.mark.gpu
@rules
@pytest.mark.parametrize("gate", GATES)
def test_data_at_any_address(gate, rule):
    """Where it is aligned, where it is not, and again: the same bits."""
    x = low(member(gate, rule, T=100, K=64, V=64))
    do = torch.randn(1, 100, 2, 64, dtype=torch.bfloat16)

    def results(place):
        leaves = [place(t.cuda()).requires_grad_() for t in x.values()]
        named = dict(zip(x, leaves, strict=True))
        o, state = fw.linear_recurrence(**named)
        return [o, state, *torch.autograd.grad(o, leaves, place(do.cuda()))]

    def moved(t):
        room = torch.empty(t.numel() + 1, dtype=t.dtype, device="cuda")
        room[1:].copy_(t.flatten())
        found = room[1:].view(t.shape)
        assert found.data_ptr() % 16
        return found

    first = results(torch.clone)
    for place in (torch.clone, moved, torch.clone):
        assert all(map(torch.equal, results(place), first))
