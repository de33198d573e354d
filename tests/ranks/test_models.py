"""Layers and models on ranks that share a sequence, in fp64."""

import pytest
import torch.distributed as dist
from support import rank_cases
from support.process_group import ProcessGroup
from support.rank_cases import SPREAD_MODELS

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def group():
    """Two processes."""
    made = ProcessGroup(2)
    yield made
    made.stop()


@pytest.mark.parametrize("spread", SPREAD_MODELS)
def test_a_model_of_every_layer(group, spread):
    """Losses at borders of ranks too; blocks kept, and computed again."""
    group.run(rank_cases.check_layers, SPREAD_MODELS[spread])


@pytest.mark.parametrize("spread", SPREAD_MODELS)
def test_states_go_on_after_a_shared_prompt(group, spread):
    """Of layers that made their own, and of those with room from the start."""
    for room in (False, True):
        group.run(rank_cases.check_states, SPREAD_MODELS[spread], room)


def test_layers_that_have_no_way_over_ranks(group):
    group.run(rank_cases.check_refused_layers)
