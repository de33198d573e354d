"""The bits of a sequence: alone, in company, and cut into several calls."""

import itertools

import pytest
import torch
from support.batch_invariance_cases import EDGES, check_invariance
from support.inputs import GATES, RULES
from support.pairwise import parametrize_all

from fastweights.kernels.recurrence import settings

# A fixed gate, whose gradient is a sum over all sequences, is one per head.
GATES_OF_TOKENS = [x for x in GATES if x != "fixed"]
MEMBERS = list(itertools.product(GATES_OF_TOKENS, RULES))


@parametrize_all(
    T=[75, 64],
    edges={"edges": EDGES, "no-edges": ()},
    gate=GATES_OF_TOKENS,
    rule=RULES,
)
def test_bits(gate, rule, T, edges, set_segments, monkeypatch):
    """Of two segments, with and without a tail, where others would be cut."""
    set_segments(2)
    monkeypatch.setattr(settings, "BATCH_INVARIANT_SEGMENT", 32)
    sizes = {"H": 1, "HV": 1, "K": 17, "V": 9}
    sizes |= {"dtype": torch.float32, "device": "cpu"}
    options = {"backend": "triton", "chunk_size": 16}
    others = (1, 37), (1, 40)
    check_invariance(gate, rule, edges, T, others, 32, sizes, **options)


# T, edges, dtype, K and V.
ON_GPU = [
    (20000, EDGES, torch.bfloat16, 128),
    (16384, EDGES, torch.bfloat16, 128),
    (16384, (), torch.bfloat16, 128),
    (20000, EDGES, torch.float16, 64),
    (20000, EDGES, torch.float32, 64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("T, edges, dtype, D", ON_GPU, ids=str)
@pytest.mark.parametrize("gate, rule", MEMBERS)
def test_bits_on_a_gpu(gate, rule, T, edges, dtype, D):
    sizes = {"H": 1, "HV": 2, "K": D, "V": D, "dtype": dtype}
    sizes["device"] = "cuda"
    others, segment = [(1, 3000), (1, 9001)], settings.BATCH_INVARIANT_SEGMENT
    check_invariance(
        gate, rule, edges, T, others, segment, sizes, backend="triton"
    )
