"""The short convolution's kernels against PyTorch in fp64."""

import pytest
import torch
from support.convolution_inputs import HEADS, convolution_inputs, flat
from support.inputs import assert_same, results
from support.kernel_judge import needs_memory
from support.pairwise import parametrize_pairs

from fastweights import ops
from fastweights.checks import relative_error
from fastweights.kernels import convolution
from fastweights.ops.convolution import (
    convolve_heads,
    short_convolution,
)

TRITON = ["triton forward", "triton backward"]
OFFSETS = [0, 0, 1, 3, 12, 12]


def judge(function, x, tolerance=1e-6, **options):
    """Both results and every gradient, against PyTorch in fp64."""
    with ops.record_backends() as ran:
        found = results(function, x, backend="triton", **options)
    assert ran == TRITON
    for name, t in x.items():
        assert found[f"d{name}"].dtype == t.dtype, name
    assert found["o"].dtype == found["state"].dtype == x["x"].dtype
    exact = {name: t.double() for name, t in x.items()}
    ref = results(function, exact, backend="torch", **options)
    assert_same(found, ref, tolerance)
    return found


@pytest.fixture
def short(monkeypatch):
    """Stretches of 8 tokens and blocks of 4 channels: many of them."""
    options = convolution.convolution_options

    def shorter(*of, **how):
        tile, settings = options(*of, **how)
        return tile | {"BT": 8, "BV": 4}, settings

    monkeypatch.setattr(convolution, "convolution_options", shorter)


ONE = {"heads": (1, 1), "sizes": (3, 4)}  # 10 channels


# Two heads of q and k, and of v one block and a part of another.
FUNCTIONS = {
    "channels": (short_convolution, 3, {}),
    "one-head": (flat, 10, {**ONE, "eps": 0.5}),
    "as-it-is": (flat, 10, {**ONE, "qk_l2norm": False}),
    "heads": (flat, 18, HEADS),
}


@pytest.mark.usefixtures("short")
@parametrize_pairs(
    function=FUNCTIONS,
    T=[1, 2, 5, 8, 9, 19],
    W=[2, 3, 4],
    without=[(), ("bias",), ("bias", "initial_state")],
    activation=["silu", None],
    use=["both", "o", "state"],
    packed=[False, True],
)
def test_it_is_pytorchs(function, T, W, without, activation, use, packed):
    """Packed: empty ones, ones shorter than a state, one of two chunks."""
    call, C, given = function
    if call is short_convolution:
        given = {"activation": activation}
    sizes = {"B": 2 if T < 8 else 1, "T": T}
    if packed:
        offsets = torch.tensor(OFFSETS, dtype=torch.int32)
        given, sizes = given | {"cu_seqlens": offsets}, {"T": 12, "N": 5}
        sizes["B"] = 1
    x = convolution_inputs(**sizes, C=C, W=W, dtype=torch.float32)
    x = {name: t for name, t in x.items() if name not in without}
    judge(call, x, use=use, **given)


def test_chunks_as_they_ship():
    judge(
        short_convolution,
        convolution_inputs(B=1, T=67, C=5, dtype=torch.float32),
    )


@pytest.mark.parametrize("K, V", [(96, 192), (128, 128)])
def test_blocks_as_they_ship(K, V):
    """Heads that are no power of two, and values in a block and a half."""
    x = convolution_inputs(B=1, T=5, C=2 * K + V, dtype=torch.float32)
    judge(flat, x, heads=(1, 1), sizes=(K, V))


@pytest.mark.usefixtures("short")
def test_half_precision_sums_its_gradients_in_fp32():
    kind = {"dtype": torch.float16, "single": torch.float32}
    x = convolution_inputs(B=1, T=9, C=10, **kind)
    found = judge(flat, x, 4e-4, **ONE)
    exact = {name: t.double() for name, t in x.items()}
    ref = results(flat, exact, **ONE)
    for name in ("dweight", "dbias"):
        assert relative_error(found[name], ref[name]) < 1e-6


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("size", [0.0, 1e18])
def test_sums_of_any_size(size):
    """e^{-z} overflows, and what is nothing stays so."""
    x = convolution_inputs(B=1, T=3, C=10, bias=False, dtype=torch.float32)
    x |= {name: size * x[name] for name in ("x", "initial_state")}
    *found, last = convolve_heads(**x, **ONE, backend="triton")
    *ref, _ = convolve_heads(**x, **ONE, backend="torch")
    assert torch.equal(last, x["x"])
    for y, y_ref in zip(found, ref, strict=True):
        torch.testing.assert_close(y, y_ref, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "offsets", [[5, 7, 3, 0], [-9, 99, 2, 1], [30] * 4, [0, 0, 3, 20]]
)
def test_offsets_that_are_none_stay_within_the_tokens(offsets):
    """On a GPU no host reads them: wrong numbers, but no other memory.

    The last are offsets, of a sequence without a token before all others.

    Every tensor lies between guards, which are NaN: they stay so, and none
    gets into a number.
    """
    (T, C, W, N), guard = (20, 3, 4, 3), 30
    tile, settings = convolution.convolution_options(C, 0, 0, T, back=False)
    meta = convolution.ConvolutionMeta(
        C, 0, 0, W, True, False, **tile | {"BT": 8}
    )
    cu_seqlens = torch.tensor(offsets)
    made = []

    def rows(*shape):
        padded = (shape[0] + 2 * guard, *shape[1:])
        made.append(torch.full(padded, float("nan")))
        inner = made[-1][guard:-guard]
        return inner.copy_(torch.randn(shape))

    torch.manual_seed(0)
    weight, state = torch.randn(C, W), rows(N, W - 1, C)
    x, y, dy, dx = (rows(T, C)[None] for _ in range(4))
    last, dlast, dstate = (rows(N, W - 1, C) for _ in range(3))
    share = rows(convolution.num_chunks(x, cu_seqlens, 8), W, C)
    call = (meta, settings, None, (x, weight, None, state), cu_seqlens)
    output_grads, grads = (dy, dy, dy, dlast), (dx, share, dstate)
    run = convolution.launch_chunks
    run(convolution.convolution_fwd_kernel, *call, (y, y, y), last)
    run(convolution.convolution_bwd_kernel, *call, output_grads, grads)
    for t in made:
        assert t[:guard].isnan().all() and t[-guard:].isnan().all()
        assert t[guard:-guard].isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_kernels_of_a_call_without_a_token(packed):
    offsets = torch.tensor([0, 0, 0]) if packed else None
    x = convolution_inputs(B=1 if packed else 2, T=0, N=2, dtype=torch.float32)
    found = results(short_convolution, x, cu_seqlens=offsets, backend="triton")
    assert torch.equal(found["state"], x["initial_state"])
    assert found["dinitial_state"].all() and not found["dweight"].any()


@pytest.mark.usefixtures("short")
def test_pieces_are_all_at_once():
    x = convolution_inputs(B=1, T=7, C=10, dtype=torch.float32)
    kind = {"backend": "triton", **ONE}
    *ref, state = convolve_heads(**x, **kind)
    pieces, last = [], x.pop("initial_state")
    for piece in x.pop("x").split([1, 2, 4], dim=1):
        *found, last = convolve_heads(piece, **x, initial_state=last, **kind)
        pieces.append(found)
    for parts, whole in zip(zip(*pieces, strict=True), ref, strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert torch.equal(last, state)


BUDGETS = {
    torch.bfloat16: 3e-3,
    torch.float16: 4e-4,
    torch.float32: 3e-6,  # e^{-z} is approximate there, to 2^-22 |z|
}
PUBLISHED = {
    "128": ((2, 4), (128, 128)),
    "96": ((3, 3), (96, 192)),
    "256": ((1, 1), (256, 512)),
    "odd": ((2, 3), (5, 7)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize("heads, sizes", PUBLISHED.values(), ids=PUBLISHED)
def test_packed_on_gpu(heads, sizes, dtype, W):
    """And twice the same bits."""
    T, offsets = 1000, [0, 0, 1, 3, 67, 67, 130, 640, 1000]
    C = 2 * heads[0] * sizes[0] + heads[1] * sizes[1]
    N = len(offsets) - 1
    kind = {"dtype": dtype, "single": torch.float32, "device": "cuda"}
    x = convolution_inputs(B=1, T=T, C=C, W=W, N=N, **kind)
    options = {"heads": heads, "sizes": sizes}
    options["cu_seqlens"] = torch.tensor(offsets, device="cuda")
    first = judge(flat, x, BUDGETS[dtype], **options)
    assert_same(results(flat, x, **options), first, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 16, 64, 65, 5000])
@pytest.mark.parametrize("dtype", BUDGETS)
def test_a_batch_on_gpu(dtype, T):
    """5000 tokens have long chunks in the backward."""
    x = convolution_inputs(B=2, T=T, C=200, dtype=dtype, device="cuda")
    first = judge(short_convolution, x, BUDGETS[dtype])
    assert_same(results(short_convolution, x), first, 0.0)


@pytest.mark.gpu
@needs_memory(40)
def test_offsets_past_2_31():
    """The last tokens stand on their own: no other is in their sums."""
    T, C = 2**17 + 100, 2**14
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(1, T, C, **options).requires_grad_()
    weight = torch.randn(C, 4, device="cuda")
    assert x.numel() > 2**31
    y, _ = short_convolution(x, weight, backend="triton")
    y.backward(torch.ones_like(y))
    few = x[:, -8:].detach().double().requires_grad_()
    ref, _ = short_convolution(few, weight.double(), backend="torch")
    ref.backward(torch.ones_like(ref))
    assert_same(
        {"y": y[0, -5:].detach(), "dx": x.grad[0, -5:]},
        {"y": ref[0, -5:].detach(), "dx": few.grad[0, -5:]},
        3e-3,
    )
