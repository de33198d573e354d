"""Packed softmax attention: each sequence alone, in memory linear in T."""

import itertools

import pytest
import torch
from support.inputs import assert_same
from support.layer_cases import hidden, make_layer
from support.pairwise import parametrize_all
from torch.nn.attention import varlen

from fastweights.checks import Footprint
from fastweights.layers import SoftmaxAttention
from fastweights.layers.common import causal_attention
from fastweights.layers.common.causal_attention import (
    attend_by_tiles,
    packed_attention,
    sdpa,
)

LENGTHS = [5, 0, 1, 18, 3]
T = sum(LENGTHS)
OFFSETS = torch.tensor([0, *itertools.accumulate(LENGTHS)])


def heads(T=T, H=4, HK=2, K=8, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    to = {"dtype": dtype, "device": device, "requires_grad": True}
    return [torch.randn(1, T, n, K, **to) for n in (H, HK, HK)]


def attend_alone(q, k, v, lengths=LENGTHS):
    """Each sequence by itself, in fp64."""
    parts = [x.double().split(list(lengths), 1) for x in (q, k, v)]
    whole = [sdpa(*of) for of in zip(*parts, strict=True) if of[0].numel()]
    return torch.cat(whole, 1)


def with_gradients(o, inputs):
    torch.manual_seed(1)
    do = torch.randn(o.shape, dtype=torch.float64).to(o)
    return o, *torch.autograd.grad(o, inputs, do)


@pytest.mark.parametrize("size", [4, 9, 26, 27, 99])
@pytest.mark.parametrize("shared", [False, True])
def test_tiles_of_packed_sequences_are_each_alone(size, shared, monkeypatch):
    monkeypatch.setattr(causal_attention, "TILE", size)
    x = heads(HK=2 if shared else 4)
    want = with_gradients(attend_alone(*x), x)
    for dtype in (torch.int32, torch.int64):
        o = attend_by_tiles(*x, OFFSETS.to(dtype))
        assert_same(with_gradients(o, x), want, 1e-13)


def test_on_a_cpu_each_is_alone():
    x = heads()
    for offsets in (OFFSETS, OFFSETS.int()):
        o = packed_attention(*x, offsets)
        assert_same(
            with_gradients(o, x), with_gradients(attend_alone(*x), x), 1e-13
        )


def test_memory_grows_with_the_tokens(monkeypatch):
    """Twice the tokens take twice the elements, and no T x T ever."""
    peaks = {}
    for T, size in [(256, 32), (512, 32), (512, 512)]:
        monkeypatch.setattr(causal_attention, "TILE", size)
        x = heads(T, H=1, HK=1, dtype=torch.float32)
        offsets = torch.arange(0, T + 1, 64)
        with Footprint() as seen:
            attend_by_tiles(*x, offsets).sum().backward()
        peaks[T, size] = seen.peak
        assert (seen.largest >= T * T) == (size == T)
    assert peaks[512, 32] < 2.2 * peaks[256, 32]
    assert peaks[512, 32] < peaks[512, 512] / 4


@pytest.mark.parametrize(
    "name, backend",
    [
        pytest.param("softmax", "aot_eager"),
        pytest.param("softmax-options", "aot_eager", marks=pytest.mark.full),
        pytest.param("softmax-options", "inductor", marks=pytest.mark.full),
    ],
)
def test_tiles_compile_whole(name, backend, monkeypatch):
    monkeypatch.setattr(causal_attention, "TILE", 8)
    torch._dynamo.reset()
    layer, x = make_layer(name), hidden(1, T)
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        y, state = call(x, cu_seqlens=OFFSETS)
        assert state is None
        results.append(with_gradients(y, [*layer.parameters()]))
    assert_same(results[1], results[0], 1e-5)


def literal(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa):
    """What varlen_attn is documented to do, sequence by sequence."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert min(max_q, max_k) >= max(cu_q.diff().max(), 2)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    o = torch.empty_like(q)
    for n in range(len(cu_q) - 1):
        of, to = slice(*cu_q[n : n + 2]), slice(*cu_k[n : n + 2])
        keys, values = (
            x[to].repeat_interleave(q.shape[1] // x.shape[1], 1)
            for x in (k, v)
        )
        scores = torch.einsum("ihk,jhk->hij", q[of], keys) / q.shape[-1] ** 0.5
        if window_size == (-1, 0):
            scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        o[of] = torch.einsum("hij,jhk->ihk", scores.softmax(-1), values)
    return o


def pretend(monkeypatch):
    """That PyTorch's kernels, as documented, run here."""
    monkeypatch.setattr(causal_attention, "reads_offsets", lambda *given: True)
    monkeypatch.setattr(varlen, "varlen_attn", literal)
    monkeypatch.setattr(causal_attention, "ASKS_FOR_GQA", True)


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_gpu_is_asked_for(shared, monkeypatch):
    pretend(monkeypatch)
    with torch.no_grad():
        x = heads(HK=2 if shared else 4)
        assert_same([packed_attention(*x, OFFSETS)], [attend_alone(*x)], 1e-13)
        one = [y[:, :1] for y in x]
        o = packed_attention(*one, torch.tensor([0, 0, 1]))
        assert_same([o], [attend_alone(*one, [0, 1])], 1e-13)


@pytest.mark.parametrize("HK", [4, 2, 1])
def test_pytorchs_kernels_take_what_they_are_given(HK, monkeypatch):
    """Traced without numbers: nothing reads the offsets on the way."""
    monkeypatch.setattr(causal_attention, "reads_offsets", lambda *given: True)
    torch._dynamo.reset()
    x = heads(HK=HK, K=64, dtype=torch.bfloat16, device="meta")
    run = torch.compile(packed_attention, fullgraph=True, backend="aot_eager")
    for call in (packed_attention, run):
        o = call(*x, OFFSETS.to("meta"))
        grads = torch.autograd.grad(o.sum(), x)
        for found, given in zip((o, *grads), (x[0], *x), strict=True):
            assert found.shape == given.shape and found.dtype == given.dtype


@pytest.mark.parametrize("kernels", [False, True])
def test_under_autocast_it_is_in_half_precision(kernels, monkeypatch):
    if kernels:
        pretend(monkeypatch)
    monkeypatch.setattr(causal_attention, "TILE", 8)
    x = heads(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = packed_attention(*x, OFFSETS)
    assert o.dtype == torch.bfloat16
    assert_same(
        with_gradients(o, x), with_gradients(attend_alone(*x), x), 0.02
    )


@pytest.mark.parametrize(
    "device, dtype, K, capability, kernels",
    [
        ("cuda", torch.bfloat16, 64, (8, 0), True),
        ("cuda", torch.float16, 256, (9, 0), True),
        ("cuda", torch.float32, 64, (9, 0), False),
        ("cuda", torch.bfloat16, 64, (7, 5), False),
        ("cuda", torch.bfloat16, 20, (9, 0), False),
        ("cuda", torch.bfloat16, 224, (9, 0), False),
        ("cpu", torch.bfloat16, 64, (9, 0), False),
    ],
)
def test_where_pytorch_has_kernels(
    device, dtype, K, capability, kernels, monkeypatch
):
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capability
    )
    found = causal_attention.reads_offsets(torch.device(device), dtype, K)
    assert found is kernels


# On a GPU.
DOCUMENTS = (700, 0, 1, 65, 1300, 234)


def judge_on_gpu(dtype, K, HK, call=packed_attention):
    """As near to each sequence alone in fp64 as the dtype allows."""
    x = heads(sum(DOCUMENTS), 4, HK, K, dtype, "cuda")
    ends = [0, *itertools.accumulate(DOCUMENTS)]
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    call(*x, offsets)  # to load or compile kernels may wait for the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = call(*x, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = with_gradients(attend_alone(*x, DOCUMENTS), x)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 0.015)
    assert_same(with_gradients(o, x), want, tolerance)


@pytest.mark.gpu
@parametrize_all(
    dtype=[torch.float16, torch.bfloat16, torch.float32],
    K=[64, 128, 256, 20],
    HK=[1, 2, 4],
)
def test_packed_on_gpu(dtype, K, HK):
    judge_on_gpu(dtype, K, HK)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_on_gpu(dtype):
    torch._dynamo.reset()
    call = torch.compile(packed_attention, fullgraph=True)
    judge_on_gpu(dtype, 64, 2, call)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, part", [(torch.bfloat16, 3), (torch.float32, 1)]
)
def test_a_layer_on_gpu_never_holds_a_mask(dtype, part):
    """Forward and backward at T 16,384, where a mask alone is 256 MiB."""
    T, D = 16_384, 64
    torch.manual_seed(0)
    layer = SoftmaxAttention(D, 4, device="cuda", dtype=dtype)
    x = torch.randn(1, T, D, device="cuda", dtype=dtype)
    offsets = torch.arange(0, T + 1, 1024, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer(x, cu_seqlens=offsets)[0].square().mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{dtype}: peak {peak / 2**20:.0f} MiB")
    assert peak < T * T / part
