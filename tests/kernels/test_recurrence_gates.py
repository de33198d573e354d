"""The family's kernels at hard gates and keys, against the fp64 loop."""

import pytest
import torch
from support.inputs import GATES, RULES, member_inputs
from support.kernel_judge import HALF, on_devices
from support.pairwise import all_but, parametrize_all
from support.recurrence_judge import (
    budget_of,
    cast,
    correlated_keys,
    judge,
    judge_amplified,
    judge_gates,
    take_turns,
)

import fastweights as fw

# Weak, and from -5 on too strong to be seen from half: gates.is_factorable.
STRENGTHS = (0.0, -1e-3, -1.0, -5.0, -10.0, -20.0)
HARD = {
    "identical-beta-0": {"beta": 0.0, "cosine": 1.0},
    "identical-beta-1": {"beta": 1.0, "cosine": 1.0},
    "identical-beta-2": {"beta": 2.0, "cosine": 1.0},
    "cosine-0.9-beta-1": {"beta": 1.0, "cosine": 0.9},
    "cosine-0.9-beta-2": {"beta": 2.0, "cosine": 0.9},
}


@parametrize_all(
    strength=STRENGTHS,
    gate=["fixed", "head", "channel"],
    rule=RULES,
    covered_once=["fixed"],
)
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_constant_gates(gate, rule, strength, device, dtype, record_property):
    T, HV = (130, 1) if device == "cpu" else (500, 2)
    x = member_inputs(gate, rule, T=T, K=64, V=64, HV=HV, strength=strength)
    budget, label = budget_of(dtype), f"constant gates, {dtype}"
    x = cast(x, dtype, device)
    judge_gates(*judge(x, budget, record_property, label), budget)


@pytest.mark.parametrize("rule", RULES)
def test_gates_in_blocks_of_eight(rule):
    """A step leaves 2^-14.4: further than blocks of 16 rows may go."""
    x = member_inputs("channel", rule, T=130, HV=1, K=64, V=64, strength=-10.0)
    judge_gates(*judge(cast(x, torch.float16), HALF), HALF)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_gates_that_open_again(gate):
    """What is left after a strong gate is as exact as what comes later."""
    x = member_inputs(gate, "delta", T=128, K=64, V=64, strength=-1e-3)
    x["g"][:, :40] = -20
    judge(cast(x, torch.float32), 1e-4)


@parametrize_all(keys=HARD, gate=GATES, covered_once=["none", "fixed"])
@on_devices(cpu=["float16"], cuda=["float32", "bfloat16"])
def test_correlated_keys(gate, keys, device, dtype):
    judge_amplified(cast(correlated_keys(gate, **keys), dtype, device))


@pytest.mark.parametrize("gate", GATES)
@on_devices(cpu=["float32"], cuda=["float16", "bfloat16"])
def test_keys_of_uneven_length(gate, device, dtype, set_matmul_precision):
    """Steps beta |k|^2 below 1, by keys of length 1 and longest in turns.

    The inverse has products of the long keys in it, which fp16 may not.
    """
    set_matmul_precision("medium")
    T, D, longest = 150, 64, 300.0 if dtype == torch.float16 else 1000.0
    x = member_inputs(gate, "delta", T=T, K=D, V=D, strength=-0.03)
    length = torch.where(torch.arange(T) % 2 == 0, 1.0, longest)[:, None]
    x["k"] = x["k"] * length[..., None]
    x["beta"] = x["beta"] / length**2
    judge(cast(x, dtype, device), HALF)


@pytest.mark.parametrize("gate", GATES)
def test_identical_keys_and_a_negative_rate(gate, set_matmul_precision):
    """The rule grows then, beyond what the inverse in fp16 has room for."""
    set_matmul_precision("medium")
    x = correlated_keys(gate, beta=-0.6, cosine=1.0, T=64)
    judge(cast(x, torch.float32), HALF)


@pytest.mark.parametrize("gate", GATES)
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_keys_that_erase_nothing_or_all(gate, device, dtype):
    """Identical keys, some of which erase nothing, and half of others."""
    x = member_inputs(gate, "erase", T=100, K=64, V=33, strength=-0.03)
    x["k"] = x["k"][:, :1].sign().expand_as(x["k"]) / 8
    strengths = torch.ones(100, 1, 64)
    strengths[::3], strengths[1::3, :, ::2] = 0, 0
    x["erase_key"] = (strengths * x["k"]).expand_as(x["erase_key"])
    judge_amplified(cast(x, dtype, device))


@pytest.mark.parametrize("gate", GATES)
def test_keys_with_which_a_state_grows(gate, set_matmul_precision):
    """By 1.618 per token: beyond what the inverse in fp16 has room for."""
    set_matmul_precision("medium")
    x = member_inputs(
        gate, "erase", T=64, H=1, HV=1, K=64, V=64, strength=-1e-3
    )
    x |= take_turns(T=64, K=64, length=1.0)
    judge(cast(x, torch.float32), HALF)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strongest", [-1e15, torch.finfo(torch.float32).min])
def test_a_gate_a_head_that_shuts(rule, strongest):
    """However strong, it does not drown those after it."""
    x = member_inputs("head", rule, T=100, K=33, V=20, strength=-0.1)
    x["g"][:, 30:33] = strongest
    judge(cast(x, torch.float32), 1e-4)


def test_a_gate_a_channel_that_shuts():
    """By fp32's least, which is past fp16, in which gates are summed."""
    x = member_inputs("channel", "delta", T=16, HV=1, strength=-0.1)
    x["g"][:, 10:13, :, :3] = torch.finfo(torch.float32).min
    judge(cast(x, torch.float32), 1e-4, chunk_size=16)


@pytest.mark.parametrize("rule", RULES)
@on_devices(cpu=["float16", "float32"], cuda=["float32", "bfloat16"])
def test_nothing_passes_a_gate_of_minus_infinity(rule, device, dtype):
    """To the bit, though a step of a block is seen as 2^-29, or 2^-56."""
    x = member_inputs("channel", rule, T=64, HV=1, K=33, V=20, strength=-3.0)
    x["g"][:, 22] = -torch.inf
    x = cast(x, dtype, device)
    o, state = fw.linear_recurrence(**x, backend="triton")
    x["v"][:, :22] *= 1e4 if dtype == torch.float16 else 1e20
    again = fw.linear_recurrence(**x, backend="triton")
    assert torch.equal(again[0][:, 22:], o[:, 22:])
    assert torch.equal(again[1], state)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_chunks_that_decay_too_far_for_fp16(gate):
    """By e^-16, which fp32 could divide by, and still answer in fp16."""
    x = member_inputs(gate, "delta", T=64, HV=1, K=33, V=20, strength=-0.25)
    judge(cast(x, torch.float16), budget_of(torch.float16))


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_what_a_chunk_leaves_in_fp16(gate):
    """A chunk that decays by 2^-9, and writes nothing itself."""
    x = member_inputs(gate, "additive", T=128, HV=1, K=33, V=20, strength=-0.1)
    x["v"][:, 64:] = 0.0
    judge(cast(x, torch.float16), budget_of(torch.float16))


@pytest.mark.parametrize("rule", RULES)
@on_devices(cpu=["float16"], cuda=["bfloat16"])
@pytest.mark.parametrize("strongest", [-5.0, -14.0, -50.0])
def test_one_strong_gate_a_channel(rule, strongest, device, dtype):
    """In a chunk whose decay still has a bound; the rest hardly forget."""
    x = member_inputs("channel", rule, T=100, K=64, V=33, strength=-1e-3)
    x["g"][:, 20] = strongest
    judge(cast(x, dtype, device), HALF)


FOLDS = (-0.7, -1.2, -2.5, -5.0, -10.0, -20.0, -60.0)  # at ever later levels


@pytest.mark.parametrize("rule", all_but(["delta"], RULES))
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_a_gate_a_channel_at_all_levels(rule, device, dtype, record_property):
    """Chunks as strong as FOLDS in turns, and shut where they are -60.

    Of 70 channels the last six, a key tile of their own, hardly decay in the
    even chunks, and the others hardly in the odd ones: each key tile is at
    a level of its own, and what is next to a border as exact as the rest.
    """
    T, budget = 64 * len(FOLDS), budget_of(dtype)
    x = member_inputs("channel", rule, T=T, HV=1, K=70, V=33, strength=-1e-3)
    for i, strength in enumerate(FOLDS):
        own = slice(0, 64) if i % 2 == 0 else slice(64, 70)
        x["g"][:, 64 * i : 64 * (i + 1), :, own] = strength
    x["g"][:, 64 * 6 + 9 : 64 * 6 + 20 : 4, :, ::3] = -torch.inf
    x = cast(x, dtype, device)
    judge_gates(*judge(x, budget, record_property, "all levels"), budget)


@pytest.mark.parametrize("rule", all_but(["delta"], RULES))
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
@pytest.mark.parametrize("first", [True, False])
def test_a_key_tile_that_needs_shorter_blocks(first, rule, device, dtype):
    """One tile marks the chunk; the other, which does not, decays faster.

    It loses 150 bits in 16 rows, fewer than 160 in the chunk.
    """
    x = member_inputs("channel", rule, T=64, HV=1, K=128, V=33, strength=-1e-3)
    marking, fast = (3, 100) if first else (100, 3)
    x["g"][..., marking] = -3.0
    x["g"][:, 16:32, :, fast] = -6.5
    budget = budget_of(dtype)
    judge_gates(*judge(cast(x, dtype, device), budget), budget)


@pytest.mark.parametrize("rule", RULES)
@on_devices(cpu=["float32"], cuda=["bfloat16"])
def test_one_value_head_forgets(rule, device, dtype):
    """Of six value heads one decays by e^-300 in a chunk, the rest hardly."""
    x = member_inputs(
        "channel", rule, T=100, H=3, HV=6, K=64, V=33, strength=-1e-3
    )
    x["g"][:, :, 4] = -5
    judge(cast(x, dtype, device), budget_of(dtype))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", ["head", "channel"])
@on_devices(cpu=["float32"], cuda=["bfloat16"])
def test_gates_that_are_nan(gate, rule, device, dtype):
    """A gate that is NaN is seen from its token on, in the state too."""
    x = member_inputs(gate, rule, T=150, K=33, V=33, strength=-0.02)
    x["g"][:, 100] = float("nan")
    o, state = fw.linear_recurrence(**cast(x, dtype, device), backend="triton")
    assert not o[:, :64].isnan().any()
    assert o[:, 100:].isnan().all() and state.isnan().all()


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_gate_above_zero_is_no_other(gate):
    """The documented range ends at 0; what is a little above is right."""
    x = member_inputs(gate, "delta", T=64, K=33, V=33, strength=-0.02)
    x["g"][:, 60] = 0.5
    judge(cast(x, torch.float32), 1e-4)
