"""A schedule takes the kernels that Triton would, with what they need."""

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from copy import copy
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
import triton
from support.inputs import GATES, RULES, member_inputs
from triton import runtime
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import _allocation, _async_compile
from triton.runtime.jit import create_function_from_signature

import fastweights as fw
from fastweights.arguments import RecurrenceOptions
from fastweights.kernels.gpu import gpu_of
from fastweights.kernels.recurrence import backend, stages
from fastweights.kernels.recurrence.schedule import (
    SCALE,
    Launch,
    RuntimeNumber,
    Schedule,
    TensorSpec,
    _allocate_descriptors,
    buffer_offsets,
    compile_together,
    flatten,
    regroup,
    stand_in,
)
from fastweights.kernels.recurrence.settings import (
    CallKind,
    Lengths,
    lengths_of,
    settings_of,
)
from fastweights.kernels.recurrence.stages import CallTensors

T = RuntimeNumber("T")
rules = pytest.mark.parametrize("rule", RULES)


def to_bf16(x):
    """The same in bf16, states in fp32."""
    return {
        name: t.float() if name == "initial_state" else t.bfloat16()
        for name, t in x.items()
    }


def specialization(kernel, arguments):
    """What Triton compiles a kernel for, by its arguments."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(
        kernel.signature, kernel.params, backend
    )
    return bind(*arguments)[1]


def is_spec(x):
    return isinstance(x, TensorSpec)


def as_called(x, q, lengths):
    """An argument of a launch, with the tensors of a call of these lengths."""
    if isinstance(x, tuple):
        return regroup(x, (as_called(y, q, lengths) for y in x))
    if is_spec(x):
        return x.empty(q, x.shape(lengths))
    return stand_in(x)  # numbers: of the stand-in Triton takes the type only


def schedules(x, ends, chunk_size=64):
    """The kernels' forward and backward of a call, and its lengths."""
    tensors = CallTensors(
        *(x.get(name) for name in CallTensors._fields[:6]), *ends
    )
    options = RecurrenceOptions(scale=1.0, chunk_size=chunk_size)
    kind, sizes = backend.kind_and_sizes(tensors, options)
    lengths = lengths_of(kind, *sizes)
    kinds, segmented = backend.dtypes_of(tensors), lengths.borders > 0
    dstate = None if ends[0] is None else torch.float32
    back = kinds._replace(do=kinds.v, dstate=dstate)
    forward = stages.forward_schedule(kind, kinds, segmented)
    backward = stages.backward_schedule(kind, back, segmented)
    return forward, backward, lengths


@rules
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_a_schedule_has_the_kernels_of_every_length(gate, rule):
    """All that Triton looks at is that of the call's tensors and numbers."""
    q = torch.empty(0, device="meta")
    found, cuts = {}, set()
    for B, T, K in itertools.product((1, 3), (1, 16, 37, 2100), (33, 64)):
        x = to_bf16(member_inputs(gate, rule, B=B, T=T, H=1, HV=3, K=K, V=40))
        ends = [(x["initial_state"], None), (None, None)]
        if B == 1:
            ends.append((None, torch.tensor([0, T // 2, T])))
        for end in ends:
            *both, lengths = schedules(x, end)
            cuts.add(lengths.borders > 0)
            for schedule in both:
                found[id(schedule)] = schedule
                for step in schedule.launches:
                    assert step.programs.value(lengths) > 0
                    seen = [as_called(t, q, lengths) for t in step.arguments]
                    for spec in filter(is_spec, flatten(step.arguments)):
                        made = spec.empty(q, spec.shape(lengths))
                        assert made.dtype == spec.dtype
                    stand_ins = [*map(stand_in, step.arguments)]
                    now = specialization(step.kernel, stand_ins)
                    assert now == specialization(step.kernel, seen)
    assert len(cuts) > 1
    assert len(found) <= 2 * 2 * 3 * len(cuts)  # K, ends: not one a length


@rules
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_a_new_length_is_of_a_known_kind(gate, rule):
    """Nothing is traced again, and no length is a key."""
    stages.forward_schedule.cache_clear()
    stages.backward_schedule.cache_clear()
    for T in range(65, 500, 29):
        x = to_bf16(member_inputs(gate, rule, T=T, H=1, HV=1, K=16, V=16))
        schedules(x, (None, None))
    assert stages.forward_schedule.cache_info().misses == 1
    assert stages.backward_schedule.cache_info().misses == 1


class Kernel:
    """In place of a jitted kernel, which it compiles to: notes its use.

    As Triton's, it is compiled in the thread of the mode that is on, if one
    is, and its result is kept. Of ``stages`` it takes 100 bytes each.
    """

    __name__ = "some_kernel"
    src = "its source"

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
LENGTHS = Lengths(*[2] * 8)._replace(T=3, tokens=6, slots=7)


@dataclass(frozen=True)
class Constants:
    TMA: bool


def two_launches(kernel, tma=False, **options):
    """From x to y, and from there to z."""
    x, y, z = (
        TensorSpec(name, of, row, torch.float32)
        for name, of, row in (
            ("x", "tokens", (5,)),
            ("y", "slots", (50,)),
            ("z", "N", (4,)),
        )
    )
    rest, settings = (Constants(tma),), {"num_warps": 4} | options
    launches = [
        Launch(
            kernel,
            RuntimeNumber("slots"),
            ((x, y), (None, T), *rest),
            settings,
        ),
        Launch(
            kernel,
            RuntimeNumber("slots", 3, 2),
            (y, z, (SCALE, 6), *rest),
            settings,
        ),
    ]
    return Schedule(launches, ["x", "absent"], [z], [])


def run(schedule, scale=1.0):
    inputs = [torch.ones(2, 3, 5), None]
    results, _ = schedule(inputs, LENGTHS, scale, [torch.empty(0)])
    return inputs[0], results["z"]


def test_addresses_and_constants():
    kernel = Kernel()
    schedule = two_launches(kernel)
    compile_together(schedule)
    assert kernel.notes == ["compiled"] and not schedule.kernels
    schedule.load(SHARED)
    x, z = run(schedule, 0.5)
    assert z.shape == (2, 4) and z.dtype == torch.float32
    (first, _, ((at_x, at_y), *one)), (then, _, others) = kernel.notes[1:]
    assert first == (7, 1, 1) and then == (11, 1, 1)
    assert at_x == x.data_ptr() and one[0] == (None, 3)
    assert others == (at_y, z.data_ptr(), (0.5, 6), one[1])
    assert run(schedule, 2.0)[1] is not z
    assert kernel.notes[-1][2][2] == (2.0, 6)
    longer = LENGTHS._replace(T=9, slots=70, N=3)
    made, _ = schedule([x, None], longer, 1.0, [torch.empty(0)])
    assert made["z"].shape == (3, 4)
    assert [note[0][0] for note in kernel.notes[-2:]] == [70, 105]
    assert kernel.notes[-2][2][1] == (None, 9)


def test_threads_make_what_launches_a_kernel(monkeypatch):
    """Triton 3.6 would run a C compiler for it as each kernel is loaded."""
    made = []

    def launcher(src, metadata):
        made.append((src, metadata.shared, threading.current_thread()))
        raise OSError("no C compiler")  # told when the kernel is loaded

    active = SimpleNamespace(launcher_cls=launcher)
    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=active))
    schedule = two_launches(Kernel())
    compile_together(schedule)
    ((src, shared, thread),) = made
    assert (src, shared) == ("its source", 100)
    assert thread is not threading.main_thread()
    schedule.load(SHARED)
    run(schedule)


def test_what_another_thread_compiles_is_waited_for():
    kernel, made = Kernel(), Future()
    key = lambda kernel: None  # noqa: E731
    takes = len(signature(_async_compile.FutureKernel).parameters)
    kernel.made[1] = _async_compile.FutureKernel(*[key] * (takes - 1), made)
    schedule = two_launches(kernel)
    compile_together(schedule)
    made.set_result(kernel)
    schedule.load(SHARED)
    run(schedule)
    assert [note[0] for note in kernel.notes] == [(7, 1, 1), (11, 1, 1)]


def test_what_cannot_be_compiled_says_so_and_may_be_later():
    """By the kernel's name, and in the compiler's words."""
    kernel = Kernel()
    schedule = two_launches(kernel)
    kernel.error = ValueError("no ptxas")
    compile_together(schedule)
    message = "some_kernel does not compile: no ptxas"
    with pytest.raises(RuntimeError, match=message) as caught:
        schedule.load(SHARED)
    assert caught.value.__cause__ is kernel.error
    assert not schedule.kernels
    kernel.error = None
    kernel.made.clear()
    compile_together(schedule)
    schedule.load(SHARED)
    run(schedule)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_compilation_leaves_no_mode_behind(error):
    """What is compiled afterwards is compiled as ever."""
    kernel = Kernel()
    schedule = two_launches(kernel)
    kernel.error = error()
    with pytest.raises(error):
        compile_together(schedule)
    assert _async_compile.active_mode.get() is None
    kernel.error = None
    kernel.made.clear()
    compile_together(schedule)
    schedule.load(SHARED)
    assert len(schedule.kernels) == 2


def test_a_mode_of_the_callers_is_left_alone():
    kernel = Kernel()
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool) as mode:
        schedule = two_launches(kernel)
        compile_together(schedule)
        assert _async_compile.active_mode.get() is mode
        assert not mode.raw_futures
        schedule.load(SHARED)
    assert len(schedule.kernels) == 2


def test_without_the_mode_kernels_are_compiled_one_by_one(monkeypatch):
    monkeypatch.delattr(triton, "AsyncCompileMode")
    kernel = Kernel()
    schedule = two_launches(kernel)
    compile_together(schedule)
    assert not kernel.notes
    schedule.load(SHARED)
    assert kernel.notes == ["compiled"] and len(schedule.kernels) == 2


@pytest.mark.parametrize(
    "shared, stages", [(300, [3]), (299, [3, 2]), (100, [3, 2, 1])]
)
def test_fewer_stages_where_shared_memory_is_short(shared, stages):
    """As many as fit by what the compiler says."""
    kernel = Kernel()
    schedule = two_launches(kernel, num_stages=3)
    compile_together(schedule)
    schedule.load(shared)
    assert [*kernel.made] == stages
    assert run(schedule)[1].shape == (2, 4)


def test_what_does_not_fit_is_named():
    schedule = two_launches(Kernel(), num_stages=2)
    message = "some_kernel takes 100 bytes of shared memory, .* GPU has 99;"
    with pytest.raises(RuntimeError, match=message):
        schedule.load(99)


def test_memory_for_descriptors():
    """Ours where a kernel makes them, in any thread; the caller keeps its."""
    kernel, theirs = Kernel(), object()

    def launch(tma):
        schedule = two_launches(kernel, tma)
        compile_together(schedule)
        schedule.load(SHARED)
        run(schedule)

    def copied():
        triton.set_allocator(theirs)
        with ThreadPoolExecutor() as pool:
            pool.submit(launch, True).result()
        launch(True)
        launch(False)
        return _allocation._allocator.get()

    assert copy_context().run(copied) is theirs
    used = [note[1] for note in kernel.notes if note != "compiled"]
    assert used == [_allocate_descriptors] * 4 + [theirs] * 2


def test_tensors_of_a_buffer_are_aligned():
    sizes = ("tokens", 1), ("N", 64), ("slots", 0), ("L", 129), ("T", 5)
    rooms = [TensorSpec("x", of, (n,), torch.uint8) for of, n in sizes]
    lengths = Lengths(*[1] * 8)._replace(N=2)
    lines = [x.lines for x in rooms]
    assert buffer_offsets(lines, lengths) == [0, 128, 256, 256, 512, 640]
    assert buffer_offsets([], lengths) == [0]


def test_a_call_aligns_its_inputs():
    """Slices at any address are copied; what is aligned is not."""
    inputs = to_bf16(member_inputs("none", "additive", T=64, H=1, K=64, V=64))
    x = [inputs[name] for name in "qkv"]
    v = torch.empty(x[2].numel() + 1, dtype=x[2].dtype)[1:]
    v = v.view_as(x[2]).copy_(x[2])
    assert v.is_contiguous() and v.data_ptr() % 16
    assert backend.aligned(None) is None and backend.aligned(x[0]) is x[0]
    copy = backend.aligned(v)
    assert torch.equal(copy, v) and copy.data_ptr() % 16 == 0
    columns = backend.aligned(x[0].mT)
    assert torch.equal(columns, x[0].mT) and columns.is_contiguous()


@pytest.mark.parametrize(
    "V, BV, tma",
    [(64, 64, True), (65, 128, False), (128, 128, True), (192, 64, True)],
)
@rules
def test_no_tile_reads_the_next_head(V, BV, tma, rule):
    """A descriptor has no mask for columns: tiles are whole."""
    gpu, gate = gpu_of(torch.device("cpu")), 128
    sizes = (torch.bfloat16, 1, 1, 128, V, gate, rule != "additive")
    kind = CallKind(gpu, *sizes, 64, "tf32", rule == "erase")
    meta, _ = settings_of("scan_backward", kind)
    assert (tma, BV) == (meta.TMA, meta.BV)


@pytest.mark.gpu
@rules
@pytest.mark.parametrize("gate", GATES)
def test_data_at_any_address(gate, rule):
    """Where it is aligned, where it is not, and again: the same bits."""
    x = to_bf16(member_inputs(gate, rule, T=100, K=64, V=64))
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
