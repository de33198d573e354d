"""What a launch costs the host, and that it takes the kernel Triton would."""

import dataclasses
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
from fastweights.kernels import launch
from fastweights.kernels.call import INPUTS, Call, _allocate
from fastweights.kernels.tile import INTERPRETED

CALL = "fastweights.kernels.call"
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


@pytest.fixture
def launches(monkeypatch):
    """Every launch, and none is made: its call, stage, kernel, arguments."""
    found = []
    monkeypatch.setattr(
        Call, "run", lambda *arguments: found.append(arguments)
    )
    return found


def forward_and_backward(x, cu_seqlens=None, chunk_size=64):
    names = ("q", "k", "v", "g", "beta", "initial_state")
    inputs = (*(x.get(name) for name in names), cu_seqlens)
    call = Call(*inputs, 1.0, chunk_size)
    o, state, saved = launch._forward(call)
    launch.backward(o, state, *inputs, saved, 1.0, chunk_size)
    launch.backward(None, state, *inputs, saved, 1.0, chunk_size)


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
def test_a_kind_and_the_types_say_which_kernel_it_is(gate, rule, launches):
    """Over B, T, segments and packing: all that Triton looks at."""
    for B, T, K in itertools.product((1, 3), (1, 16, 37, 2100), (33, 64)):
        x = low(member(gate, rule, B=B, T=T, H=1, HV=3, K=K, V=40))
        forward_and_backward(x)
        del x["initial_state"]
        forward_and_backward(x)
        if B == 1:
            offsets = torch.tensor([0, T // 2, T])
            forward_and_backward(x, cu_seqlens=offsets)
    found = {}
    for call, stage, kernel, programs, *arguments in launches:
        assert programs > 0
        same = (id(call.kind), stage, *map(type, arguments))
        constants = call.constants(stage)
        now = specialization(kernel, arguments, constants)
        assert found.setdefault(same, now) == now
    assert len(found) < len(launches) / 4
    assert any(call.segments > 1 for call, *_ in launches)


class Kernel:
    """In place of a jitted kernel: notes which way it was launched."""

    arg_names = ("x", "n", "BT", "EVEN")

    def __init__(self):
        self.ways = []

    def warmup(self, *arguments, grid, **constants):
        self.ways.append(("compiles", grid[0], *arguments, constants))

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            way = "compiled" if len(grid) == 3 else "by Triton"
            self.ways.append((way, grid[0], *arguments, constants))
            return self

        return run


class Promised(Kernel):
    """Still being compiled, by a thread that came first."""

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            super(Promised, self).__getitem__(grid)(*arguments, **constants)
            done = Future()
            done.set_result(self)
            return triton.FutureKernel(lambda kernel: None, done)

        return run


def test_what_another_thread_compiles_is_waited_for(monkeypatch):
    monkeypatch.setattr(f"{CALL}.INTERPRETED", False)
    monkeypatch.setattr(f"{CALL}._kinds", {})
    constants = {"EVEN": True, "BT": 16}
    monkeypatch.setattr(f"{CALL}.constants", lambda *_: constants)
    x = member("none", "additive", T=20, dtype=torch.float32)
    kernel = Promised()
    for _ in range(2):
        call = Call(x["q"], x["k"], x["v"], None, None, None, None, 1.0, 16)
        call.run("scan", kernel, 7, x["q"], 5)
    assert [way for way, *_ in kernel.ways] == ["by Triton", "compiled"]


class AsksForMemory(Kernel):
    """Notes whose memory Triton would take for descriptors."""

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.ways.append(_allocation._allocator.get())
            return self

        return run


def test_memory_for_descriptors(monkeypatch):
    """Ours where a kernel makes them, in any thread; the caller keeps its."""
    monkeypatch.setattr(f"{CALL}.INTERPRETED", False)
    monkeypatch.setattr(f"{CALL}._kinds", {})
    inputs = low(member("scalar", "delta", T=64, H=1, K=64, V=64))
    x = [inputs.get(name) for name in INPUTS[:5]]
    kernel, theirs = AsksForMemory(), object()
    kernel.arg_names = (*kernel.arg_names, "TMA")

    def launch(stage):
        for _ in range(2):  # by Triton, then past it
            Call(*x, None, None, 1.0, 64).run(stage, kernel, 1, x[0], 2)

    def copied():
        triton.set_allocator(theirs)
        with ThreadPoolExecutor() as pool:
            pool.submit(launch, "scan").result()
        launch("chunk_states")
        launch("intra")
        return _allocation._allocator.get()

    monkeypatch.setattr(
        f"{CALL}.constants",
        lambda stage, *_: {"BT": 64, "EVEN": 1, "TMA": stage != "intra"},
    )
    assert copy_context().run(copied) is theirs
    assert kernel.ways == [_allocate] * 4 + [theirs] * 2


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


def test_the_second_launch_goes_past_triton(monkeypatch):
    monkeypatch.setattr(f"{CALL}.INTERPRETED", False)
    monkeypatch.setattr(f"{CALL}._kinds", {})
    constants = {"EVEN": True, "num_warps": 4, "BT": 16}
    monkeypatch.setattr(f"{CALL}.constants", lambda *_: constants)
    x = member("none", "additive", T=20, dtype=torch.float32)
    inputs = (x["q"], x["k"], x["v"], None, None, None, None, 1.0, 16)
    kernel, q = Kernel(), x["q"]

    Call(*inputs).run("scan", kernel, 7, q, 5)
    assert kernel.ways.pop() == ("by Triton", 7, q, 5, constants)
    Call(*inputs).run("scan", kernel, 8, q, 6)
    assert kernel.ways.pop() == ("compiled", 8, q, 6, 16, True, {})
    # a dry call of the same kind launches nothing
    dry = dataclasses.replace(Call(*inputs), dry=True)
    dry.run("scan", kernel, 8, q, 6)
    launched = Call(*inputs)
    launched.run("scan", kernel, 8, q, 6)
    dataclasses.replace(launched, dry=True).run("scan", kernel, 8, q, 6)
    ways = [kernel.ways.pop()[0] for _ in range(3)]
    assert ways == ["compiles", "compiled", "compiles"]
    # None where there was a tensor, another stage, another dtype elsewhere
    Call(*inputs).run("scan", kernel, 7, None, 5)
    Call(*inputs).run("segments", kernel, 7, q, 5)
    other = Call(*inputs, others=(q.bfloat16(),))
    other.run("scan", kernel, 7, q, 5)
    assert [way for way, *_ in kernel.ways] == ["by Triton"] * 3


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
