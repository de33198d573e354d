"""The family's kernels on packs, and on sequences cut into segments."""

import pytest
import torch
from support.inputs import GATES, RULES, member_inputs
from support.kernel_judge import HALF, on_devices
from support.pairwise import parametrize_all
from support.recurrence_judge import (
    budget_of,
    cast,
    chosen_members,
    judge,
    kernel_results,
    pack_of,
    take_turns,
)

from fastweights.arguments import RecurrenceOperands, RecurrenceOptions
from fastweights.kernels.recurrence import backend as triton_recurrence

LENGTHS = [0, 37, 0, 0, 1, 16, 35, 0]  # at both ends too, a chunk and more


@chosen_members("none additive", "channel delta")
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_packed_sequences(
    gate, rule, device, dtype, set_segments, record_property
):
    lengths, V, sizes = LENGTHS, 33, (16, 32)
    if device == "cuda":
        lengths, V, sizes = [0, 137, 0, 0, 1, 64, 350, 0], 64, (64, 64)
    x = member_inputs(gate, rule, T=sum(lengths), N=len(lengths), K=64, V=V)
    x, label = cast(x, dtype, device), f"packed, {dtype}"
    given = record_property, label
    options = pack_of(lengths, torch.int32, device)
    judge(x, budget_of(dtype), *given, **options, chunk_size=sizes[0])
    if device == "cuda":
        set_segments(3)
        judge(x, budget_of(dtype), **options)
    del x["initial_state"]
    options = pack_of(lengths, torch.int64, device)
    judge(x, budget_of(dtype), *given, **options, chunk_size=sizes[1])


class Guarded:
    """Tensors with NaN on both sides of their memory, as wide as they are."""

    def __init__(self):
        self.buffers = []

    def like(self, x):
        """A copy of x between its guards."""
        wide = 2 * x.numel() + -2 * x.numel() % 16  # keeps it aligned
        buffer = x.new_full((2 * wide + x.numel(),), WORST[x.dtype])
        within = buffer[wide : wide + x.numel()]
        within.copy_(x.flatten())
        self.buffers.append((buffer, wide, x.numel()))
        return within.view(x.shape)

    def hold(self):
        """Nothing was written next to a tensor."""
        for buffer, wide, size in self.buffers:
            for side in (buffer[:wide], buffer[wide + size :]):
                worst = torch.full_like(side, WORST[side.dtype])
                assert side.equal(worst) or side.isnan().all()


WORST = dict.fromkeys((torch.float32, torch.float64), float("nan"))
WORST |= {torch.int32: 7, torch.int64: 99}


@pytest.mark.parametrize(
    ("gate", "rule", "S"),
    [
        ("none", "additive", 1),
        ("head", "additive", 3),
        ("head", "delta", 3),
        ("channel", "delta", 1),
    ],
)
def test_offsets_that_lie_reach_no_other_memory(
    gate, rule, S, set_segments, monkeypatch
):
    """Negative, decreasing and past the end; read and written is our own.

    Each tensor lies between NaNs: they stay, and no result has one.
    """
    guarded = Guarded()

    def zeros(make):
        return lambda *arguments, **options: guarded.like(
            make(*arguments, **options).zero_()
        )

    for owner, name in ((torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, zeros(getattr(owner, name)))
    set_segments(S)
    offsets = torch.tensor([-30, 29, 5, 70])
    sizes = {"T": 40, "N": 3, "HV": 1, "K": 8, "V": 5}
    x = member_inputs(gate, rule, **sizes, dtype=torch.float32)
    x = {name: guarded.like(t) for name, t in x.items()}
    names = ("q", "k", "v", "g", "beta", "erase_key", "initial_state")
    inputs = RecurrenceOperands(*map(x.get, names), guarded.like(offsets))
    monkeypatch.setattr(
        triton_recurrence, "check_offsets_on_host", lambda *_: None
    )
    options = RecurrenceOptions(scale=1.0, chunk_size=16)
    o, state, saved = triton_recurrence.forward(inputs, options)
    do, dstate = guarded.like(torch.ones_like(o)), guarded.like(state)
    grads = triton_recurrence.backward(do, dstate, inputs, saved, options)
    assert all(t.isfinite().all() for t in (o, state, *grads))
    guarded.hold()


def test_offsets_that_are_not_contiguous():
    x = member_inputs(
        "head", "delta", T=sum(LENGTHS), N=len(LENGTHS), K=33, V=20
    )
    offsets = pack_of(LENGTHS)["cu_seqlens"].repeat_interleave(2)[::2]
    assert not offsets.is_contiguous()
    judge(cast(x, torch.float32), 1e-4, cu_seqlens=offsets)


@parametrize_all(S=[2, 3, 7], gate=GATES, rule=RULES, covered_once=["fixed"])
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_segments_are_one_sequence(
    gate, rule, S, device, dtype, set_segments, record_property
):
    """Fewer chunks than segments, a last one that is shorter, and none."""
    set_segments(S)
    sizes, chunks = {"T": 85, "H": 1, "HV": 2, "K": 33, "V": 33}, (16, 32)
    sizes["strength"] = -0.01
    if device == "cuda":
        sizes = {"B": 2, "T": 1000, "H": 2, "HV": 4, "K": 128, "V": 128}
        chunks = 64, 64
    x = cast(member_inputs(gate, rule, **sizes), dtype, device)
    given = record_property, f"{S} segments, {dtype}"
    judge(x, budget_of(dtype), *given, chunk_size=chunks[0])
    del x["initial_state"]
    judge(x, budget_of(dtype), chunk_size=chunks[1], use="o")


@parametrize_all(
    gate=["fixed", "head"], rule=RULES, strength=[-0.2, -0.8, -5.0]
)
def test_segments_that_forget(gate, rule, strength, set_segments):
    """Seven chunks to a segment: some of them, one, and none reach its end.

    A map of nothing, and states that know nothing of what entered.
    """
    set_segments(3)
    x = member_inputs(gate, rule, T=330, HV=1, K=24, V=24, strength=strength)
    judge(cast(x, torch.float32), 1e-4, chunk_size=16)


@pytest.mark.parametrize("gate", ["fixed", "head"])
def test_keys_that_do_not_forget(gate, set_segments):
    """A step beta |k|^2 above 2 makes up for a gate: see intra's bound.

    All keys are the same one, of length 1.8, so that e^g |1 - |k|^2| = 0.977
    of the state is left per token, and 7 % after a segment, though the gates
    alone would leave less than 2^-100.
    """
    set_segments(3)
    x = member_inputs(
        gate, "delta", T=330, H=1, HV=1, K=16, V=16, strength=-0.83
    )
    x["k"] = 1.8 * x["k"][:, :1].expand_as(x["k"])
    x["beta"] = torch.ones_like(x["beta"])
    judge(cast(x, torch.float32), 1e-4, chunk_size=16)


@pytest.mark.parametrize("gate", ["fixed", "head"])
def test_keys_that_take_turns_and_do_not_forget(gate, set_segments):
    """Each writes what the other erases by: 2.25 times as much per token.

    Their steps have the eigenvalue 1, but so large a singular value. The
    gates alone would leave less than 2^-100 of a segment, and leave 1.01^112.
    """
    set_segments(3)
    x = member_inputs(
        gate, "erase", T=330, H=1, HV=1, K=16, V=16, strength=-0.8
    )
    x |= take_turns(T=330, K=16, length=1.8)
    judge(cast(x, torch.float32), 1e-4, chunk_size=16)


@chosen_members("head delta", "channel delta", "none additive")
def test_segments_of_one_long_sequence_among_short_ones(
    gate, rule, set_segments
):
    """Borders lie where the long one has them, wherever it starts."""
    set_segments(6)
    several = [[181, 0, 33, 70], [3, 5, 270, 6], [20, 20, 20, 224]]
    # All of them where a program looks for the most: the others cost time.
    for sizes in several if gate == "head" else several[1:2]:
        x = member_inputs(gate, rule, T=284, N=4, HV=1, K=33, V=33)
        judge(cast(x, torch.float32), 1e-4, **pack_of(sizes), chunk_size=16)


@chosen_members("none delta", "channel additive")
def test_tiles_by_descriptors(gate, rule, set_segments):
    """Of packed sequences in segments: none reads another, or a next head."""
    set_segments(3)
    lengths = [0, 150, 0, 40]
    x = member_inputs(gate, rule, T=190, N=4, H=1, HV=2, K=64, V=64)
    x = cast(x, torch.float16)
    options = {"scale": 0.3, **pack_of(lengths)}
    before, _ = judge(x, HALF, **options)
    for name in "qkv":
        x[name][:, :150] = float("nan")
    after = kernel_results(x, **options)
    assert after["o"][:, :150].isnan().all()
    assert torch.equal(after["o"][:, 150:], before["o"][:, 150:])
    assert torch.equal(after["state"][2:], before["state"][2:])
    assert torch.equal(after["dk"][:, 150:], before["dk"][:, 150:])
