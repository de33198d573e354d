"""Ranks that share a sequence against one process, in fp64."""

import functools

import pytest
import torch
import torch.distributed as dist
from support import rank_cases
from support.process_group import ProcessGroup
from support.rank_cases import spreads

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no gloo", allow_module_level=True)

MEMBERS = (
    "linear_attention",
    "retention",
    "mamba2",
    "gated_retention",
    "gla",
    "deltanet",
    "gated_deltanet",
    "kda",
    "gated_deltanet2",
    "comba",
)


@pytest.fixture(scope="module")
def groups():
    """Two processes, three, and four."""
    made = {size: ProcessGroup(size) for size in (2, 3, 4)}
    yield made
    for group in made.values():
        group.stop()


def every(test):
    cases = [
        pytest.param(size, spread, id=f"{size}-{name.replace(' ', '-')}")
        for size in (2, 4)
        for name, spread in spreads(size).items()
    ]
    return pytest.mark.parametrize("size, spread", cases)(test)


@every
def test_members_on_ranks_are_those_of_one_process(groups, size, spread):
    """Outputs, final states, and all gradients."""
    for name in MEMBERS:
        groups[size].run(rank_cases.check_member, name, spread)
    groups[size].run(rank_cases.check_member, "kda", spread, "loop")


@pytest.mark.parametrize(
    "size, spread",
    [
        pytest.param(size, spread, id=f"{size}-{name.replace(' ', '-')}")
        for size in (3, 4)
        for name, spread in spreads(size).items()
    ],
)
def test_maps_that_are_exchanged_by_doubling(groups, size, spread):
    """What more ranks do than an all-gather is for."""
    run = functools.partial(groups[size].run, rank_cases.check_by_doubling)
    for name in ("kda", "mamba2"):
        run(rank_cases.check_member, name, spread)
    run(rank_cases.check_selective, spread, True)


@every
def test_normalised_linear_attention_on_ranks(groups, size, spread):
    groups[size].run(rank_cases.check_normalised, spread)


@every
def test_mlstm_on_ranks(groups, size, spread):
    for empty in (True, False):
        groups[size].run(rank_cases.check_mlstm, spread, empty)


@every
def test_selective_scan_on_ranks(groups, size, spread):
    for softplus in (True, False):
        groups[size].run(rank_cases.check_selective, spread, softplus)


@every
def test_convolutions_on_ranks(groups, size, spread):
    """Ranks of fewer tokens than a filter has, too."""
    for W in (2, 4):
        groups[size].run(rank_cases.check_convolution, spread, W, W > 2)


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_narrow_dtypes_on_ranks(groups, name):
    for dtype in (torch.float32, torch.bfloat16):
        for spread in spreads(2).values():
            groups[2].run(rank_cases.check_in_dtype, name, spread, dtype)


@pytest.mark.parametrize("spread", ["equal", "a pack"])
def test_a_compiled_member_on_ranks(groups, spread):
    groups[2].run(
        rank_cases.check_compiled, "gated_deltanet", spreads(2)[spread]
    )


def test_doubling_in_one_graph(groups):
    given = rank_cases.check_compiled, "mamba2", spreads(3)["a pack"]
    groups[3].run(rank_cases.check_by_doubling, *given)


def test_a_checkpointed_member_on_ranks(groups):
    for spread in spreads(2).values():
        groups[2].run(rank_cases.check_checkpointed, "kda", spread)


def test_a_packs_states_may_stay_where_they_are(groups):
    spread = spreads(4)["an unequal pack"]
    groups[4].run(rank_cases.check_own_states, "gated_deltanet", spread)


def test_what_does_not_fit_is_named(groups):
    groups[2].run(rank_cases.check_refusals)


def test_a_rank_that_raises_ends_the_others(groups):
    """At once, and what it says is what is said."""
    said = r"rank 1: (?s:.*)v: got shape \[2, 7, 3, 3\], need"
    with pytest.raises(AssertionError, match=said):
        groups[2].run(rank_cases.raise_on_one_rank)
    assert groups[2].run(rank_cases.rank_in_mesh) == [0, 1]
