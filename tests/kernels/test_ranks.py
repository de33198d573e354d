"""What ranks tell each other, found by the kernels that find segments'."""

import pytest
import torch.distributed as dist
from support import rank_cases
from support.process_group import ProcessGroup
from support.rank_cases import Spread

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no gloo", allow_module_level=True)

SPREADS = {
    "equal": Spread((70, 70), None, False),
    "empty": Spread((0, 42), None),
    "three": Spread((20, 37, 20), (0, 2, 75)),
    "a pack": Spread((50, 50), (0, 3, 3, 40, 67, 100), False),
    "one sequence": Spread((50, 50), (0, 97), False),
    "an unequal pack": Spread((20, 45), (0, 0, 19, 19, 63, 65)),
    "an empty first": Spread((0, 45), (0, 0, 3, 45)),
}
# Gates and rules of every sort, and borders of every sort.
CASES = [
    pytest.param("kda", "equal", 3, marks=pytest.mark.full),
    ("deltanet", "equal", 3),
    ("deltanet", "three", 2),
    ("gla", "three", 2),
    ("gla", "empty", 2),
    ("gated_deltanet", "a pack", 3),
    ("linear_attention", "a pack", 2),
    ("mamba2", "one sequence", 2),
    ("gated_deltanet", "an unequal pack", 1),
    ("comba", "an empty first", 2),
    ("retention", "an empty first", 1),
]


@pytest.fixture(scope="module")
def groups():
    """Two processes, and three."""
    made = {size: ProcessGroup(size) for size in (2, 3)}
    yield made
    for group in made.values():
        group.stop()


@pytest.mark.parametrize("name, spread, segments", CASES)
def test_kernels_on_ranks_are_those_of_one_process(
    groups, name, spread, segments
):
    """Outputs, final states and all gradients."""
    given = name, SPREADS[spread], segments
    group = groups[len(SPREADS[spread].tokens)]
    group.run(rank_cases.check_kernels, *given)


@pytest.mark.parametrize(
    "spread",
    [pytest.param("empty", marks=pytest.mark.full), "an unequal pack"],
)
def test_compiled_kernels_on_ranks(groups, spread):
    groups[2].run(rank_cases.check_kernels, "kda", SPREADS[spread], 2, True)


@pytest.mark.parametrize("spread", ["an unequal pack", "empty"])
def test_kernels_of_normalised_linear_attention_on_ranks(groups, spread):
    given = "linear_attention", SPREADS[spread], 2
    groups[2].run(rank_cases.check_kernels, *given, False, True)


@pytest.mark.parametrize(
    "name, spread",
    [
        ("kda", Spread((3, 20, 4), None)),
        ("mamba2", Spread((4, 20, 5), (0, 2, 29))),
        pytest.param(
            *("kda", Spread((6,) * 3, (0, 17), False)), marks=pytest.mark.full
        ),
    ],
)
def test_kernels_maps_that_are_exchanged_by_doubling(groups, name, spread):
    """What more ranks do than an all-gather is for; additive in one graph."""
    given = rank_cases.check_kernels, name, spread, 2, name == "mamba2"
    groups[3].run(rank_cases.check_by_doubling, *given)


@pytest.mark.parametrize("name, size", [("gla", 2), ("deltanet", 3)])
def test_the_bits_of_one_process(groups, name, size):
    """In fw.batch_invariant(): o, states and gradients, and of more ranks."""
    groups[size].run(
        rank_cases.check_by_doubling, rank_cases.check_same_bits, name
    )
