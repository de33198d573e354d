"""Models of transformers as ours, ours as theirs, beside each other."""

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
from support.compat_cases import (
    LAYERS,
    SIZES,
    TINY_MODELS,
    InDouble,
    modeling,
    with_spread_gates,
)

from fastweights.checks import relative_error
from fastweights.models import (
    LanguageModel,
    ModelConfig,
    from_transformers,
    load,
)
from fastweights.models.transformers_config import config_from_transformers

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

NO_POSITIONS = {"rope_type": "default", "rope_theta": None}
MULTIMODAL = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 1],
    "mrope_interleaved": True,
}
# The model type, and what differs from the sizes that all have.
THEIRS = {
    "olmo_hybrid": ("olmo_hybrid", {"rope_parameters": NO_POSITIONS}),
    "olmo_hybrid-options": (
        "olmo_hybrid",
        {"num_key_value_heads": 2, "linear_allow_neg_eigval": False},
    ),
    "qwen3_5": ("qwen3_5", {"num_key_value_heads": 2}),
    "qwen3_5-tied": (
        "qwen3_5",
        {"tie_word_embeddings": True, "head_dim": 24, "hidden_size": 64}
        | {"rope_parameters": MULTIMODAL},
    ),
}
HYBRID = {
    "vocab_size": 64,
    "dim": 32,
    "num_layers": 2,
    "pattern": ("gated_deltanet", "softmax"),
    "num_heads": 2,
}
NORMED = {"qk_norm": True, "output_gate": True, "rotary_fraction": 0.5}
OLMO = {"qk_norm": True, "head_qk_norm": False, "num_kv_heads": 1}
# What a ModelConfig has, beside its sizes.
OURS = {
    "qwen3_5": {
        "options": {
            "gated_deltanet": {"norm_eps": 1e-6, "num_v_heads": 4},
            "softmax": NORMED,
        },
    },
    "qwen3_5-tied": {
        "pattern": 2 * ("gated_deltanet",) + ("softmax",),
        "options": {
            "gated_deltanet": {"norm_eps": 1e-6, "expand_v": 2},
            "softmax": {
                "qk_norm": True,
                "output_gate": True,
                "head_dim": None,
            },
        },
        "num_layers": 4,
        "tie_embeddings": True,
    },
    "olmo_hybrid": {
        "options": {
            "gated_deltanet": {"allow_neg_eigval": True, "conv_size": 3},
            "softmax": OLMO,
        },
        "post_norm_types": ("softmax",),
    },
}


def make_config(name, changes):
    """A class of transformers, and a config for it."""
    prefix, options = TINY_MODELS[name]
    kind = getattr(modeling(name), f"{prefix}ForCausalLM")
    fields = SIZES | {"layer_types": LAYERS} | options | changes
    return kind, kind.config_class(**fields)


def spread_gates(m):
    """Norms that are not all ones, gates that forget fast or slowly."""
    for name, x in m.named_parameters():
        if "norm" in name and x.dim() == 1:
            x.data.add_(torch.empty_like(x).uniform_(-0.4, 0.6))
    return with_spread_gates(m)


@functools.cache
def make_theirs(case="qwen3_5"):
    torch.manual_seed(0)
    kind, config = make_config(*THEIRS[case])
    return spread_gates(kind(config)).eval()


@functools.cache
def make_ours(case="qwen3_5"):
    torch.manual_seed(0)
    return spread_gates(LanguageModel(ModelConfig(**HYBRID | OURS[case])))


def token_ids(*shape):
    return torch.randint(2, 64, shape, generator=torch.manual_seed(1))


def logits(m, tokens):
    with torch.no_grad():
        found = m(tokens)
    return found[0] if isinstance(m, LanguageModel) else found.logits


def to_fp64(m):
    """In fp64, where transformers has made angles' rates in fp32."""
    m = copy.deepcopy(m).double()
    rotary, rope = m.model.rotary_emb, m.config.rope_parameters
    if rotary is not None:
        R = 2 * len(rotary.inv_freq)
        at = torch.arange(0, R, 2, dtype=torch.float64) / R
        rotary.inv_freq = rope["rope_theta"] ** -at
    return m


def assert_same_bits(m, n):
    pairs = zip(m.state_dict().items(), n.state_dict().items(), strict=True)
    for (name, x), (other, y) in pairs:
        assert name == other and x.dtype == y.dtype
        assert x.equal(y), name


@pytest.mark.parametrize("case", THEIRS)
def test_logits_of_theirs(case):
    m, tokens = make_theirs(case), token_ids(2, 70)
    n, wanted = from_transformers(m), logits(m, tokens)
    assert relative_error(logits(n, tokens), wanted) <= 1e-5
    offsets = torch.tensor([0, 70, 140], dtype=torch.int32)
    with torch.no_grad():
        packed, _ = n(tokens.view(1, -1), cu_seqlens=offsets)
    assert relative_error(packed.view_as(wanted), wanted) <= 1e-5
    m = to_fp64(m)
    with InDouble():
        wanted = logits(m, tokens)
    assert relative_error(logits(from_transformers(m), tokens), wanted) < 1e-10


@pytest.mark.parametrize("case", THEIRS)
def test_their_greedy_text(case):
    m, prompt = make_theirs(case), token_ids(2, 9)
    wanted = m.generate(prompt, max_new_tokens=20, do_sample=False)[:, 9:]
    n = from_transformers(m)
    assert torch.stack(n.generate(prompt, 20)).equal(wanted)
    assert n.generate(prompt[:1], 20, draft="lookup")[0].equal(wanted[0])


@pytest.mark.parametrize("case", OURS)
def test_ours_as_theirs(case, tmp_path):
    """Logits, text, a folder, and back in bits."""
    m, tokens = make_ours(case), token_ids(2, 40)
    there = m.to_transformers()
    assert there.config.model_type.startswith(case.partition("-")[0])
    assert relative_error(logits(there, tokens), logits(m, tokens)) <= 1e-5
    wanted = torch.stack(m.generate(tokens[:, :9], 12))
    options = {"max_new_tokens": 12, "do_sample": False}
    assert there.generate(tokens[:, :9], **options)[:, 9:].equal(wanted)
    there.save_pretrained(tmp_path)
    back = from_transformers(tmp_path)
    assert_same_bits(back, m)
    assert logits(back, tokens).equal(logits(m, tokens))


def test_what_was_opened_is_saved_and_loaded(tmp_path):
    m = from_transformers(make_theirs("olmo_hybrid"))
    m.save(tmp_path)
    again = load(tmp_path)
    assert again.config == m.config
    assert_same_bits(again, m)


def test_what_was_opened_trains():
    """As there: of a loss, the gradient that comes through all layers."""
    m, tokens = copy.deepcopy(make_theirs("olmo_hybrid")), token_ids(2, 40)
    n = from_transformers(m)
    m(tokens, labels=tokens).loss.backward()
    n.loss(tokens).backward()
    grad = m.model.embed_tokens.weight.grad
    assert relative_error(n.embedding.weight.grad, grad) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", ["qwen3_5", "olmo_hybrid"])
def test_other_dtypes_stay(case, dtype, tmp_path):
    """Buffers too, which transformers makes in fp32."""
    m, tokens = copy.deepcopy(make_ours(case)).to(dtype), token_ids(2, 40)
    there = m.to_transformers()
    assert {x.dtype for x in there.parameters()} == {dtype}
    there.save_pretrained(tmp_path)
    back = from_transformers(tmp_path)
    assert_same_bits(back, m)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert logits(there, tokens).equal(logits(again, tokens))


def test_norms_are_rounded_once():
    m = copy.deepcopy(make_theirs()).bfloat16()
    n = from_transformers(m)
    w = m.model.norm.weight.float() + 1
    assert n.norm.weight.equal(w.bfloat16())
    assert ((n.norm.weight - w) / w).abs().max() <= 2**-8
    assert_same_bits(from_transformers(n.to_transformers()), n)


def test_a_folder_with_images_has_a_text_model(tmp_path):
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3_5Config(
        text_config=make_theirs().config.to_dict(), vision_config=vision
    )
    m = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    said = "config.model_type: got 'qwen3_5', need one of olmo_hybrid, qwen"
    with pytest.raises(ValueError, match=said):
        from_transformers(m)
    m.save_pretrained(tmp_path)
    tokens = token_ids(1, 20)
    found = logits(from_transformers(tmp_path), tokens)
    assert relative_error(found, logits(m, tokens)) <= 1e-5


def scaled(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    return {"rope_parameters": rope}


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            scaled("linear"),
            "config.rope_parameters.rope_type: got 'linear'",
        ),
        (
            scaled("dynamic"),
            "config.rope_parameters.rope_type: got 'dynamic'",
        ),
        ({"hidden_act": "gelu"}, "config.hidden_act: got 'gelu', need 'silu'"),
        (
            {"attention_bias": True},
            "config.attention_bias: got True, need False",
        ),
        (
            {"attention_dropout": 0.1},
            "config.attention_dropout: got 0.1, need 0",
        ),
        (
            {"layer_types": 2 * ["linear_attention"] + ["sliding_attention"]},
            "config.layer_types: got 'sliding_attention', need one of linear",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "config.quantization_config: got {'quant_method': 'fp8'}, need N",
        ),
    ],
)
def test_a_config_without_counterpart(changes, said):
    there = make_config("qwen3_5", changes)[1]
    with pytest.raises(ValueError) as error:
        config_from_transformers(there)
    assert str(error.value).startswith(said)


def test_experts_are_another_model_type(tmp_path):
    kind, config = make_config("qwen3_5_moe", {})
    kind(config).save_pretrained(tmp_path)
    said = "config.model_type: got 'qwen3_5_moe_text', need one of olmo_hybr"
    with pytest.raises(ValueError, match=said):
        from_transformers(tmp_path)


def test_a_model_that_is_none_of_theirs():
    with pytest.raises(TypeError, match="model: got LanguageModel, need a"):
        from_transformers(make_ours())
    with pytest.raises(ValueError, match="model: got Qwen3_5TextModel, need"):
        from_transformers(make_theirs().model)


def test_a_tensor_too_few_or_too_many(tmp_path):
    m = copy.deepcopy(make_theirs())
    m.model.register_buffer("more", torch.zeros(1))
    with pytest.raises(ValueError, match=r"model: got model\.more, for which"):
        from_transformers(m)
    m = copy.deepcopy(make_theirs())
    del m.model.layers[1].mlp.down_proj
    lacks = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=f"need {lacks}"):
        from_transformers(m)
    m.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"model: got no {lacks} in "):
        from_transformers(tmp_path)


@pytest.mark.parametrize(
    "case, changes, said",
    [
        (
            "qwen3_5",
            {"pattern": ("gated_deltanet",)},
            "qwen3_5_text (pattern: got gated_deltanet, need gated_deltanet "
            "and softmax)",
        ),
        (
            "qwen3_5",
            {"pattern": ("kda", "softmax")},
            "olmo_hybrid (pattern: got kda, softmax, need gated_deltanet and",
        ),
        (
            "qwen3_5",
            {"options": {"softmax": NORMED}},
            "qwen3_5_text (options: got norm_eps = 1e-05 for gated_deltanet, "
            "need 1e-06)",
        ),
        (
            "qwen3_5",
            {"post_norm_types": ("softmax",)},
            "qwen3_5_text (post_norm_types: got ('softmax',), need ())",
        ),
        (
            "olmo_hybrid",
            {"post_norm_types": ()},
            "olmo_hybrid (post_norm_types: got (), need ('softmax',))",
        ),
        (
            "olmo_hybrid",
            {"types_without_mlp": ("softmax",)},
            "olmo_hybrid (types_without_mlp: got ('softmax',), need ())",
        ),
        (
            "olmo_hybrid",
            {"options": {"softmax": OLMO | {"output_gate": True}}},
            "olmo_hybrid (options: got output_gate = True for softmax",
        ),
        (
            "olmo_hybrid",
            {"options": {"gated_deltanet": {"conv_size": None}}},
            "olmo_hybrid (options: got conv_size = None for gated_deltanet",
        ),
        (
            "qwen3_5",
            {
                "options": OURS["qwen3_5"]["options"]
                | {"softmax": NORMED | {"rope_theta": None}}
            },
            "qwen3_5_text (options: got rope_theta = None for softmax, need 1",
        ),
    ],
)
def test_a_config_that_they_have_not(case, changes, said):
    config = ModelConfig(**HYBRID | OURS[case] | changes)
    with pytest.raises(ValueError) as error:
        LanguageModel(config, device="meta").to_transformers()
    assert said in str(error.value)


def test_numbers_are_needed():
    config = ModelConfig(**HYBRID | OURS["qwen3_5"])
    with pytest.raises(ValueError, match=r"model: got embedding\.weight as m"):
        LanguageModel(config, device="meta").to_transformers()


def test_the_readmes_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    [code] = re.findall(r"```python\n([^`]*import from_tr[^`]*)```", readme)
    names = {"model": make_theirs()}
    exec(code, names)
    assert_same_bits(from_transformers("served"), names["ours"])
