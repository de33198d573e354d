"""A call's plan: it takes the kernels Triton would, with what they need."""

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from copy import copy
from inspect import signature
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from inputs import GATES, RULES, member
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import _allocation, _async_compile
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
    """In place of a jitted kernel, which it compiles to: notes its use.

    As Triton's, it is compiled in the thread of the mode that is on, if one
    is, and its result is kept. Of ``stages`` it takes 100 bytes each.
    """

    arg_names = ("x", "y", "scale", "n", "BT", "TMA")
    __name__ = "some_kernel"

    def __init__(self):
        self.notes, self.made, self.error = [], {}, None

    def warmup(self, *arguments, grid, num_stages=1, **constants):
        mode = _async_compile.active_mode.get()
        if num_stages in self.made:
            return self.made[num_stages]

        def make():
            self.notes.append("compiled")
            if self.error is not None:
                raise self.error
            made = copy(self)
            made.metadata = SimpleNamespace(shared=100 * num_stages)
            return made

        def keep(made):
            self.made[num_stages] = made

        if mode is None:
            keep(make())
        else:
            # Of Triton 3.9, which forgets what failed, a callback more.
            forget = [lambda _: self.made.pop(num_stages, None)]
            takes = len(signature(mode.submit).parameters)
            key = (id(self), num_stages)
            keep(mode.submit(key, make, keep, *forget[: takes - 3]))
        return self.made[num_stages]

    def __getitem__(self, grid):
        def run(*arguments):
            self.notes.append((grid, _allocation._allocator.get(), arguments))

        return run


SHARED = 1000  # bytes of shared memory, plenty


def two_launches(kernel, tma=False, **settings):
    """From x to y, and from there to z."""
    x, y, z = (torch.empty(n, device="meta") for n in (3, 50, 4))
    scale, constants = float("nan"), {"num_warps": 4, "BT": 16, "TMA": tma}
    constants |= settings
    launches = [
        Launch(kernel, 7, (x, y, None, 5), constants),
        Launch(kernel, 8, (y, z, scale, 6), constants),
    ]
    return Plan(launches, [[x], []], [z], None, scale)


def test_addresses_and_constants():
    kernel = Kernel()
    plan = two_launches(kernel)
    compile_together(plan)
    assert kernel.notes == ["compiled"] and not plan.runs
    plan.load(SHARED)
    x = torch.ones(3)
    (z,) = plan([x, None], 0.5)
    assert z.shape == (4,) and z.dtype == torch.float32
    (first, _, (at_x, at_y, none, *one)), (then, _, others) = kernel.notes[1:]
    assert first == (7, 1, 1) and then == (8, 1, 1)
    assert at_x == x.data_ptr() and none is None and one == [5, 16, False]
    assert others == (at_y, z.data_ptr(), 0.5, 6, 16, False)
    assert plan([x, None], 2.0)[0] is not z
    assert kernel.notes[-1][2][2] == 2.0


def test_what_another_thread_compiles_is_waited_for():
    kernel, made = Kernel(), Future()
    key = lambda kernel: None  # noqa: E731
    takes = len(signature(_async_compile.FutureKernel).parameters)
    kernel.made[1] = _async_compile.FutureKernel(*[key] * (takes - 1), made)
    plan = two_launches(kernel)
    compile_together(plan)
    made.set_result(kernel)
    plan.load(SHARED)
    plan([torch.ones(3), None], 1.0)
    assert [note[0] for note in kernel.notes] == [(7, 1, 1), (8, 1, 1)]


def test_what_cannot_be_compiled_says_so_and_may_be_later():
    """By the kernel's name, and in the compiler's words."""
    kernel = Kernel()
    plan = two_launches(kernel)
    kernel.error = ValueError("no ptxas")
    compile_together(plan)
    message = "some_kernel does not compile: no ptxas"
    with pytest.raises(RuntimeError, match=message) as caught:
        plan.load(SHARED)
    assert caught.value.__cause__ is kernel.error
    assert not plan.runs
    kernel.error = None
    kernel.made.clear()
    compile_together(plan)
    plan.load(SHARED)
    plan([torch.ones(3), None], 1.0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_compilation_leaves_no_mode_behind(error):
    """What is compiled afterwards is compiled as ever."""
    kernel = Kernel()
    plan = two_launches(kernel)
    kernel.error = error()
    with pytest.raises(error):
        compile_together(plan)
    assert _async_compile.active_mode.get() is None
    kernel.error = None
    kernel.made.clear()
    compile_together(plan)
    plan.load(SHARED)
    assert len(plan.runs) == 2


def test_a_mode_of_the_callers_is_left_alone():
    kernel = Kernel()
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool) as mode:
        plan = two_launches(kernel)
        compile_together(plan)
        assert _async_compile.active_mode.get() is mode
        assert not mode.raw_futures
        plan.load(SHARED)
    assert len(plan.runs) == 2


def test_without_the_mode_kernels_are_compiled_one_by_one(monkeypatch):
    monkeypatch.delattr(triton, "AsyncCompileMode")
    kernel = Kernel()
    plan = two_launches(kernel)
    compile_together(plan)
    assert not kernel.notes
    plan.load(SHARED)
    assert kernel.notes == ["compiled"] and len(plan.runs) == 2


@pytest.mark.parametrize(
    "shared, stages", [(300, [3]), (299, [3, 2]), (100, [3, 2, 1])]
)
def test_fewer_stages_where_shared_memory_is_short(shared, stages):
    """As many as fit by what the compiler says."""
    kernel = Kernel()
    plan = two_launches(kernel, num_stages=3)
    compile_together(plan)
    plan.load(shared)
    assert [*kernel.made] == stages
    (z,) = plan([torch.ones(3), None], 0.5)
    assert z.shape == (4,)


def test_what_does_not_fit_is_named():
    plan = two_launches(Kernel(), num_stages=2)
    message = "some_kernel takes 100 bytes of shared memory, .* GPU has 99;"
    with pytest.raises(RuntimeError, match=message):
        plan.load(99)


def test_a_launch_takes_whole_buffers():
    """Of a view the address would be the one of the buffer it is in."""
    x = torch.empty(3, device="meta")
    constants = {"num_warps": 4, "BT": 16, "TMA": False}
    view = Launch(Kernel(), 7, (x[1:], x, None, 5), constants)
    with pytest.raises(AssertionError, match="whole buffers"):
        Plan([view], [[x]], [], None, 1.0)


def test_memory_for_descriptors():
    """Ours where a kernel makes them, in any thread; the caller keeps its."""
    kernel, theirs = Kernel(), object()

    def launch(tma):
        plan = two_launches(kernel, tma)
        compile_together(plan)
        plan.load(SHARED)
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
