"""Products of few rows and what stands around them, against fp64."""

import pytest
import torch
import torch.nn.functional as F
from support.kernel_judge import on_devices

from fastweights.checks import relative_error
from fastweights.kernels import gemv as kernels
from fastweights.kernels.gemv import gemv

BUDGET = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
K = 48
EPS = 0.5  # as large as the squares, so that its place shows

EVERYWHERE = on_devices(
    cpu=["float32", "float16"], cuda=["float32", "bfloat16"]
)
# One row, rows that are programs of their own, those of parts of K, and tiles.
ROWS = pytest.mark.parametrize("M", [1, 3, 11, 70])


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Wide ones: the interpreter's time goes by programs. Several of K."""
    options = kernels.gemv_options

    def wider(*sizes):
        tile, settings = options(*sizes)
        parts = {"NUM_PARTS": 2} if "NUM_PARTS" in tile else {}
        BK = 32 if tile["BM"] > 16 else 16
        return tile | parts | {"BN": 64, "BK": BK}, settings

    monkeypatch.setattr(kernels, "gemv_options", wider)


def gemv_inputs(device, dtype):
    torch.manual_seed(0)
    return lambda *shape: torch.randn(shape).to(device, dtype)


def norm_rows(x, weight):
    x = x.double()
    square = x.square().mean(-1, keepdim=True)
    return x * (square + EPS).rsqrt() * weight.double()


def assert_close(found, wanted):
    assert found.shape == wanted.shape
    assert relative_error(found, wanted) <= BUDGET[found.dtype]


@EVERYWHERE
@ROWS
def test_matrices_side_by_side_behind_a_norm(M, device, dtype):
    """Rows of a slice, whose distance is not their length."""
    draw = gemv_inputs(device, dtype)
    x, norm = draw(M, K + 8)[:, :K], draw(K)
    weights = draw(65, K), draw(2, K), draw(70, K)
    found = gemv(x, *weights, norm=norm, eps=EPS)
    y = norm_rows(x, norm)
    assert_close(found, torch.cat([y @ w.double().T for w in weights], 1))


@EVERYWHERE
@ROWS
@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
@pytest.mark.parametrize("V", [16, 48])
def test_heads_are_normed_and_gated(V, activation, M, device, dtype):
    """Heads of 16 in a tile of their own, and one that no tile holds."""
    draw = gemv_inputs(device, dtype)
    x, norm, w, residual = draw(M, K), draw(V), draw(30, K), draw(M, 30)
    gate = draw(M, 2 * K)[:, 8 : 8 + K] if activation else None
    found = gemv(
        x,
        w,
        norm=norm,
        eps=EPS,
        gate=gate,
        activation=activation,
        residual=residual,
    )
    y = norm_rows(x.view(M, -1, V), norm).flatten(1)
    if gate is not None:
        gate = gate.double()
        y *= F.silu(gate) if activation == "silu" else gate.sigmoid()
    assert_close(found, residual.double() + y @ w.double().T)


@EVERYWHERE
@ROWS
def test_swiglu(M, device, dtype):
    draw = gemv_inputs(device, dtype)
    x, norm, w = draw(M, K), draw(K), draw(2 * 66, K)
    gate, up = (norm_rows(x, norm) @ w.double().T).chunk(2, 1)
    assert_close(
        gemv(x, w, norm=norm, eps=EPS, swiglu=True), F.silu(gate) * up
    )


@EVERYWHERE
@ROWS
def test_matrices_have_columns_of_their_own(M, device, dtype):
    draw = gemv_inputs(device, dtype)
    x, a, b = draw(M, 96), draw(20, 32), draw(70, 32)
    found = gemv(x, a, b, sources=(64, 16))
    x, a, b = x.double(), a.double().T, b.double().T
    assert_close(found, torch.cat([x[:, 64:] @ a, x[:, 16:48] @ b], 1))


@EVERYWHERE
@ROWS
@pytest.mark.parametrize("W, silu", [(4, True), (2, False)])
@pytest.mark.parametrize("pool", [True, False])
def test_a_step_of_the_convolution(pool, W, silu, M, device, dtype):
    """Rows of a pool that are elsewhere, or nowhere, change nothing there."""
    draw = gemv_inputs(device, dtype)
    x, w, other = draw(M, K), draw(70, K), draw(9, K)
    taps, bias, kept = draw(70, W), draw(70), draw(M + 2, W - 1, 70)
    rows = None
    if pool:
        rows = torch.randperm(M + 2, device=device)[:M]
        if M > 1:
            rows[:2] = torch.tensor([-1, M + 2])
    else:
        kept = kept[:M]
    before = kept.clone()
    options = {"convolution": (taps, bias, kept), "silu": silu, "rows": rows}
    found = gemv(x, w, other, **options)
    assert_close(found[:, 70:], x.double() @ other.double().T)
    here = torch.arange(M, device=device) if rows is None else rows
    there = (here >= 0) & (here < len(kept))
    new = (x.double() @ w.double().T)[there]
    seen = torch.cat([before[here[there]].double(), new[:, None]], 1)
    y = (seen * taps.double().T).sum(1) + bias.double()
    assert_close(found[there, :70], F.silu(y) if silu else y)
    assert_close(kept[here[there]], seen[:, 1:])
    others = torch.ones(len(kept), dtype=torch.bool, device=device)
    others[here[there]] = False
    assert kept[others].equal(before[others])


@EVERYWHERE
@pytest.mark.parametrize("some", [True, False])
@pytest.mark.parametrize(
    "B, T, W", [(1, 4, 2), (3, 5, 4), (1, 16, 4), (2, 8, 4)]
)
def test_some_tokens_of_the_convolution(B, T, W, some, device, dtype):
    """Its inputs move on by what is accepted, of none up to all tokens."""
    draw = gemv_inputs(device, dtype)
    x, w, taps = draw(B, T, K), draw(70, K), draw(70, W)
    kept, bias = draw(B + 1, W - 1, 70), draw(70)
    rows = torch.arange(B, 0, -1, device=device)
    n = torch.arange(B, device=device).mul(3).add(2) % (T + 1)
    seen = torch.cat([kept[rows].double(), x.double() @ w.double().T], 1)
    found = gemv(
        x.flatten(0, 1),
        w,
        convolution=(taps, bias, kept),
        rows=rows,
        tokens=T,
        num_accepted=n if some else None,
    )
    y = (seen.unfold(1, W, 1) * taps.double()).sum(-1)
    assert_close(found, F.silu(y + bias.double()).flatten(0, 1))
    for b, row in enumerate(rows.tolist()):
        after = int(n[b]) if some else T
        assert_close(kept[row], seen[b, after : after + W - 1])


@pytest.mark.gpu
def test_a_rows_bits_are_those_of_its_product_alone():
    """Up to two rows are one kernel, and from three to 16 another."""
    draw = gemv_inputs("cuda", torch.bfloat16)
    x, w = draw(16, 1024), draw(2048, 1024)
    for least, most in ((1, 2), (3, 16)):
        alone = gemv(x[:least], w)
        assert gemv(x[:most], w)[:least].equal(alone)
