"""Models a token at a time, by what goes past their modules."""

import torch

from fastweights.checks import relative_error
from fastweights.models import LanguageModel, ModelConfig, StatePool
from fastweights.ops import record_backends

SIZES = {"vocab_size": 20, "dim": 32, "num_layers": 2, "num_heads": 2}
VOCAB_SIZE = SIZES["vocab_size"]
TOKEN_CASES = {
    "gated_deltanet": {},
    "gated_deltanet-wide": {
        "num_v_heads": 4,
        "expand_v": 2.0,
        "allow_neg_eigval": True,
    },
    "kda": {},
    "kda-bounded": {"lower_bound": -5.0, "num_v_heads": 4},
    "recurrence-channel": {"decay": "channel", "conv_size": 2},
    "recurrence-plain": {
        "decay": None,
        "rule": "additive",
        "output_gate": False,
    },
    "recurrence-any-length": {"qk_l2norm": False, "activation": False},
    "softmax": {"num_kv_heads": 1, "output_gate": True},
    "softmax-norm": {"qk_norm": True, "rotary_fraction": 0.5},
    "softmax-olmo": {
        "qk_norm": True,
        "head_qk_norm": False,
        "rope_theta": None,
    },
}


def make_model_of(case, device, dtype=torch.float32, **sizes):
    torch.manual_seed(0)
    kind, options = case.split("-")[0], {case.split("-")[0]: TOKEN_CASES[case]}
    config = ModelConfig(
        pattern=(kind,), options=options, mlp_multiple=32, **SIZES | sizes
    )
    return LanguageModel(config, device=device, dtype=dtype)


def read_by_tokens(model, tokens, states):
    """Logits of all tokens, read one by one, and what ran as a token."""
    with torch.no_grad(), record_backends() as ran:
        found = []
        for t in range(tokens.shape[1]):
            logits, states = model(tokens[:, t : t + 1], states)
            found.append(logits)
    return torch.cat(found, 1), [x for x in ran if x.endswith(" fused_step")]


def check_rows_of_a_pool(case, device, budget):
    """Tokens of rows 2, 1, none and 0 are one pass's; row 3 stays as it is."""
    model = make_model_of(case, device)
    pool = StatePool(model, 4, tokens_per_row=8)
    rows = [pool.acquire() for _ in range(3)][::-1]
    tokens = torch.randint(VOCAB_SIZE, (3, 3), device=device)
    before = [
        {name: x[3].clone() for name, x in state.tensors().items()}
        for state in pool.states
    ]
    with torch.no_grad():
        wanted, _ = model(tokens)
        found = []
        for t in range(3):
            column = torch.cat([tokens[:2, t], tokens[:1, 0], tokens[2:, t]])
            with pool.states_for([*rows[:2], -1, rows[2]], 1) as states:
                logits = model(column[:, None], states)[0]
            found.append(logits[[0, 1, 3]])
    assert relative_error(torch.cat(found, 1), wanted) <= budget
    for state, kept in zip(pool.states, before, strict=True):
        for name, x in kept.items():
            assert state.tensors()[name][3].equal(x)
