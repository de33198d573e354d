"""The selective scan's kernels against the loop in fp64."""

import itertools

import pytest
import torch
from support.inputs import assert_same, results
from support.kernel_judge import needs_memory
from support.pairwise import parametrize_pairs
from support.scan_inputs import scan_inputs

import fastweights as fw
from fastweights import ops
from fastweights.kernels import selective
from fastweights.ops.selective import SCAN

TRITON = ["triton forward", "triton backward"]
GRADIENTS = ("x", "dt", "A", "B", "C", "D", "initial_state", "z", "dt_bias")
HALF = dict.fromkeys(("o", "state"), 5e-3)
HALF |= {f"d{name}": 1e-2 for name in GRADIENTS}


def judge(x, *, use="both", **options):
    """Both results and every gradient, against the loop in fp64."""
    options["use"] = use
    with ops.record_backends() as ran:
        found = results(fw.selective_scan, x, backend="triton", **options)
    assert ran == TRITON
    assert found["o"].dtype == x["x"].dtype
    assert found["state"].dtype == torch.float32
    for name in x:
        assert found[f"d{name}"].dtype == x[name].dtype, name
    exact = {name: t.double() for name, t in x.items()}
    ref = results(fw.selective_scan, exact, backend="loop", **options)
    single = x["x"].dtype == torch.float32
    assert_same(found, ref, 1e-5 if single else HALF)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 tokens and 2 channels: many of them, and quick ones."""
    meta_of = selective.meta_of
    monkeypatch.setattr(
        selective, "meta_of", lambda *of: meta_of(*of)._replace(BT=4, BD=2)
    )


# Empty ones, and ones that end inside a tile of 4, past it and with it.
PACK = torch.tensor([0, 0, 5, 5, 6, 10, 10], dtype=torch.int32)


@pytest.mark.usefixtures("small_tiles")
@parametrize_pairs(
    # T, D, N, G: groups of 3 channels too, which tiles of 2 do not divide
    size=[
        *((1, 1, 1, 1), (3, 5, 3, 1), (4, 6, 3, 2), (9, 3, 3, 3)),
        *((5, 1, 1, None), (13, 5, 3, None), (9, 6, 3, 1)),
    ],
    dtype=[torch.float32, torch.float16],
    packed=[False, True],
    own=[False, True],
    without=[(), ("D",), ("initial_state",), ("D", "initial_state")],
    use=["both", "o", "state"],
    strength=[None, 0.0, -1e-4, -30.0],
)
def test_the_kernels_are_the_loop(
    size, dtype, packed, own, without, use, strength
):
    T, D, N, G = size
    sizes, given = {"T": T}, {"use": use, "dt_softplus": own}
    if packed:
        sizes, given["cu_seqlens"] = {"batch": 1, "T": 10, "S": 6}, PACK
    sizes |= {"D": D, "N": N, "G": G, "strength": strength}
    x = scan_inputs(**sizes, own=own, dtype=dtype)
    judge({k: t for k, t in x.items() if k not in without}, **given)


@pytest.mark.usefixtures("small_tiles")
def test_offsets_that_are_none_stay_within_the_tokens(monkeypatch):
    """On a GPU no host reads them: wrong numbers, but no other memory."""
    monkeypatch.setattr(selective, "check_offsets_on_host", lambda *_: None)
    x = scan_inputs(batch=1, T=6, D=2, N=1, S=3, dtype=torch.float32)
    found, ref = (
        results(fw.selective_scan, x, backend="triton", cu_seqlens=offsets)
        for offsets in torch.tensor([[-2, 8, 9, 7], [0, 6, 6, 6]])
    )
    assert_same(found, ref, 0.0)


@pytest.mark.usefixtures("small_tiles")
def test_the_gate_is_taken_in_single_precision():
    """Of x in fp16 too: what is fp32 has gradients as in fp32."""
    x = scan_inputs(T=9, D=4, N=3, own=True, dtype=torch.float16)
    x["z"] = x["z"].float()
    found = results(fw.selective_scan, x, dt_softplus=True, backend="triton")
    exact = {name: t.double() for name, t in x.items()}
    ref = results(fw.selective_scan, exact, dt_softplus=True, backend="loop")
    single = ("dD", "dA", "dz", "ddt", "ddt_bias")
    found, ref = ({name: x[name] for name in single} for x in (found, ref))
    assert_same(found, ref, 1e-5)


@pytest.mark.parametrize(
    "T, D, N", [(17, 17, 16), (65, 3, 1), (33, 2, 5), (9, 9, 64)]
)
def test_tiles_as_they_ship(T, D, N):
    judge(scan_inputs(batch=1, T=T, D=D, N=N, dtype=torch.float32))


@pytest.mark.usefixtures("small_tiles")
def test_narrow_steps_and_decays():
    x = scan_inputs(T=9, dtype=torch.float16)
    judge(x | {name: x[name].half() for name in ("dt", "A", "D")})


@pytest.mark.usefixtures("small_tiles")
def test_states_are_kept_for_a_backward_only():
    x = scan_inputs(T=9, dtype=torch.float32)
    y, *_ = first = fw.selective_scan(**x, backend="triton")
    assert not y.requires_grad
    grouped = {name: x[name][:, :, None] for name in ("B", "C")}
    inputs = (*(x | grouped).values(), None)
    for keep, tiles in ((False, 0), (True, 3)):
        *then, states = SCAN.forward(*inputs, keep, False, "triton")
        torch.testing.assert_close(first, tuple(then), rtol=0, atol=0)
        states = states.view(2, tiles, 3, 5)
    assert torch.equal(states[:, 0], x["initial_state"])
    cut = {n: x[n][:, :8] for n in ("x", "dt", "B", "C")}
    _, entered = fw.selective_scan(**x | cut, backend="triton")
    torch.testing.assert_close(states[:, 2], entered)


@pytest.mark.gpu
@parametrize_pairs(
    size=[*itertools.product((1, 63, 64, 65, 1000), (1, 48, 256), (1, 5, 16))],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    use=["both", "o", "state"],
    strength=[None, -30.0],
)
def test_loop_on_gpu(size, dtype, use, strength):
    T, D, N = size
    options = {"dtype": dtype, "strength": strength, "device": "cuda"}
    judge(scan_inputs(T=T, D=D, N=N, **options), use=use)


@pytest.mark.gpu
@needs_memory(60)
def test_offsets_past_2_31():
    """A decay of e^-30 a token: the last token stands on its own."""
    T, D, N = 2**17 + 100, 2**14, 4
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(1, T, D, **options).requires_grad_()
    dt = torch.ones(1, T, D, **options)
    A = torch.full((D, N), -30.0, device="cuda")
    B, C = (torch.randn(1, T, N, **options) for _ in range(2))
    assert x.numel() > 2**31
    y, state = fw.selective_scan(x, dt, A, B, C, backend="triton")
    y.backward(x.detach())
    read = (B[0, -1].double() * C[0, -1]).sum()
    last = x[0, -1].detach().double()
    found = {"y": y[0, -1].detach(), "dx": x.grad[0, -1], "state": state[0]}
    ref = dict.fromkeys(("y", "dx"), read * last)
    assert_same(
        found, ref | {"state": torch.outer(last, B[0, -1].double())}, 5e-3
    )
