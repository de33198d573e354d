"""What training makes of gates, strengths and keys, against loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from fastweights.layers import LinearRecurrence
from fastweights.models import LanguageModel, ModelConfig
from fastweights_lab.experiments.learned_gates import (
    ONE_PRODUCT,
    QUANTILES,
    measure_gates,
)


def model_of(*pattern, **options):
    torch.manual_seed(0)
    return LanguageModel(
        ModelConfig(
            vocab_size=11,
            dim=12,
            num_layers=len(pattern),
            num_heads=2,
            head_dim=6,
            pattern=pattern,
            options={"recurrence": options},
        )
    )


@pytest.fixture
def tokens():
    return torch.randint(11, (3, 21), generator=torch.manual_seed(1))


def inputs_of(model, tokens, place):
    """k, g and beta of one layer, by its own parts."""
    block = model.blocks[place]
    x = model.embedding(tokens)
    for before in model.blocks[:place]:
        x, _ = before(x)
    x, layer = block.norm(x), block.layer
    _, k, _, _ = layer.convolution(layer.qkv_proj(x))
    g = beta = None
    if layer.decay is not None:
        g = layer.decay(layer.a_proj(x))
    if layer.b_proj is not None:
        beta = layer.b_proj(x).sigmoid()
    return F.normalize(k, dim=-1), g, beta


def quantiles(x):
    ordered = sorted(x.flatten().tolist())
    return [ordered[round(q * (len(ordered) - 1))] for q in QUANTILES]


@torch.no_grad()
@pytest.mark.parametrize("decay", ("head", "channel"))
def test_gates_strengths_and_keys(tokens, decay):
    model = model_of("recurrence", "softmax", "recurrence", decay=decay)
    found = measure_gates(model, tokens, chunk=8)
    assert [of["layer"] for of in found] == [0, 2]
    for of in found:
        k, g, beta = inputs_of(model, tokens, of["layer"])
        for h in range(2):
            cosines = torch.stack(
                [
                    k[b, i, h] @ k[b, j, h]
                    for b in range(3)
                    for i in range(21)
                    for j in range(21)
                    if i != j
                ]
            )
            mean = pytest.approx(cosines.mean().item(), abs=1e-3)
            assert of["cosine"][h] == mean
            square = 1 / cosines.square().mean().item()
            assert of["directions"][h] == pytest.approx(square, rel=1e-3)
            want = quantiles(beta[..., h])
            assert of["strength"][h] == pytest.approx(want, rel=1e-3)
            gates = g[:, :, h].reshape(3, 21, -1)
            halvings = -gates / math.log(2)
            want = quantiles(halvings)
            assert of["halvings"][h] == pytest.approx(want, rel=1e-3)
            for lag, share in zip((1, 4, 16), of["kept"][h], strict=True):
                kept = [
                    halvings[:, t + 1 : t + lag + 1].sum(1) <= 1
                    for t in range(21 - lag)
                ]
                want = torch.stack(kept).double().mean().item()
                assert share == pytest.approx(want, abs=1e-3)
            chunks = [gates[:, s : s + 8].sum(1) for s in (0, 8)]
            bits = -torch.stack(chunks) / math.log(2)
            assert of["chunk"][h] == pytest.approx(quantiles(bits), rel=1e-3)
            assert of["beyond"][h] == 0


@torch.no_grad()
def test_chunks_that_take_more_than_one_product(tokens):
    model = model_of("recurrence", decay="channel")
    layer = model.blocks[0].layer
    layer.decay.dt_bias[:3] = 400.0  # dt of three channels of the first head
    (found,) = measure_gates(model, tokens, chunk=20)
    assert found["beyond"] == [0.5, 0]
    assert found["chunk"][0][-1] > ONE_PRODUCT > found["chunk"][0][0]


@torch.no_grad()
def test_what_a_layer_lacks_is_none(tokens):
    (found,) = measure_gates(model_of("recurrence", decay=None), tokens)
    for what in ("halvings", "kept", "chunk", "beyond"):
        assert found[what] is None
    assert len(found["strength"]) == 2
    (found,) = measure_gates(model_of("recurrence", rule="additive"), tokens)
    assert found["strength"] is None and len(found["kept"]) == 2
    model = model_of("softmax", "softmax")
    assert measure_gates(model, tokens) == []
    assert not any(isinstance(of, LinearRecurrence) for of in model.modules())


@torch.no_grad()
def test_equal_keys_have_one_direction():
    model = model_of("recurrence", conv_size=None)
    (found,) = measure_gates(model, torch.ones(1, 9, dtype=torch.int64))
    assert found["cosine"] == pytest.approx([1, 1], abs=1e-3)
    assert found["directions"] == pytest.approx([1, 1], abs=1e-3)
    assert not model.blocks[0].layer._forward_pre_hooks
