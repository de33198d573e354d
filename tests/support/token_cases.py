"""Models a token at a time, by what goes past their modules."""

import torch

from fastweights.models import LanguageModel, ModelConfig
from fastweights.ops import record_backends

SIZES = {"vocabulary": 20, "dim": 32, "num_layers": 2, "num_heads": 2}
V = SIZES["vocabulary"]
CASES = {
    "gated_deltanet": {},
    "gated_deltanet-wide": {
        "num_v_heads": 4,
        "expand_v": 2.0,
        "allow_neg_eigval": True,
    },
    "kda": {},
    "kda-bounded": {"lower_bound": -5.0, "num_v_heads": 4},
    "recurrence-channel": {"decay": "channel", "conv_size": 2},
    "recurrence-plain": {"decay": None, "rule": "additive", "gate": False},
    "recurrence-any-length": {"normalize": False, "activation": False},
    "softmax": {"num_kv_heads": 1, "gate": True},
    "softmax-norm": {"qk_norm": True, "rotary_fraction": 0.5},
    "softmax-olmo": {"qk_norm": True, "head_qk_norm": False, "theta": None},
}


def made(case, device, dtype=torch.float32, **sizes):
    torch.manual_seed(0)
    kind, options = case.split("-")[0], {case.split("-")[0]: CASES[case]}
    config = ModelConfig(
        pattern=(kind,), options=options, mlp_multiple=32, **SIZES | sizes
    )
    return LanguageModel(config, device=device, dtype=dtype)


def steps(model, tokens, states):
    """Logits of all tokens, read one by one, and what ran as a token."""
    with torch.no_grad(), record_backends() as ran:
        found = []
        for t in range(tokens.shape[1]):
            logits, states = model(tokens[:, t : t + 1], states)
            found.append(logits)
    return torch.cat(found, 1), [x for x in ran if x.endswith(" token")]
