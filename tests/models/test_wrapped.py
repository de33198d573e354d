"""What other tools put on a model's modules counts in all it does.

Adapters, hooks, offloaded and pruned weights, quantised heads: a module is
called, or nobody has touched it.
"""

import copy
import warnings

import pytest
import torch
from support.model_cases import KINDS, make_model, token_ids
from torch import nn
from torch.nn.utils import prune

from fastweights.layers import HeadsConvolution, ShortConvolution

DOUBLE = {"rtol": 1e-9, "atol": 1e-9}


def models_of(kind, **changes):
    """A model in fp64, and a copy of it."""
    m = make_model((kind,), num_layers=1, **changes).double()
    return m, copy.deepcopy(m)


def in_every_way(m, tokens):
    """Logits with gradients and without, losses in three ways."""
    with torch.no_grad():
        without = m(tokens)[0], m.loss(tokens)
    each = m.token_losses(tokens, tokens)
    return *without, each, m(tokens)[0], m.loss(tokens)


def owners(m):
    """The modules that have parameters of their own, by name."""
    return {
        name: module
        for name, module in m.named_modules()
        if [*module.parameters(recurse=False)]
    }


def adapt(module, seed):
    """A and B of an adapter whose forward stands on the object."""
    generator = torch.Generator().manual_seed(seed)
    n, d = module.weight.shape
    options = {"generator": generator, "dtype": torch.float64}
    A = torch.randn(2, d, **options).requires_grad_()
    B = (0.1 * torch.randn(n, 2, **options)).requires_grad_()
    own = module.forward
    if isinstance(module, nn.Embedding):
        module.forward = lambda at: own(at) + B[at] @ A
    else:
        module.forward = lambda x: own(x) + x @ A.mT @ B.mT
    return A, B


@pytest.mark.parametrize(
    "kind, tied", [("gla", True), *((kind, False) for kind in KINDS)]
)
def test_adapters_are_as_if_merged(kind, tied):
    m, merged = models_of(kind, tie_embeddings=tied)
    factors, kinds = [], nn.Linear | nn.Embedding if tied else nn.Linear
    for i, (name, module) in enumerate(m.named_modules()):
        if isinstance(module, kinds):
            A, B = adapt(module, i)
            factors += [A, B]
            with torch.no_grad():
                merged.get_submodule(name).weight += B @ A
    tokens = token_ids(2, 20)
    found = in_every_way(m, tokens)
    for a, b in zip(found, in_every_way(merged, tokens), strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)
    (found[-1] + found[-2].sin().sum()).backward()
    assert all(f.grad is not None and f.grad.any() for f in factors)


@pytest.mark.parametrize("kind", ["gated_deltanet", "mamba2"])
@pytest.mark.parametrize("cls", [nn.Linear, ShortConvolution, nn.Embedding])
def test_a_forward_on_the_class_is_called(monkeypatch, kind, cls):
    m, _ = models_of(kind, tie_embeddings=True)
    seen, own = set(), cls.forward

    def forward(self, *inputs):
        seen.add(self)
        return own(self, *inputs)

    monkeypatch.setattr(cls, "forward", forward)
    m.loss(token_ids(2, 9)).backward()
    assert seen == {x for x in m.modules() if type(x) is cls}


@pytest.mark.parametrize("kind", KINDS)
def test_a_global_hook_sees_every_module(kind):
    m, _ = models_of(kind)
    seen = set()
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: seen.add(module)
    )
    try:
        m.loss(token_ids(2, 9)).backward()
    finally:
        hook.remove()
    assert {*owners(m).values()} <= seen


def offload(module, by):
    """Its parameters are there while it is called, else on meta."""
    there = dict(module.named_parameters(recurse=False))

    def put(parameters):
        for name, p in parameters.items():
            module._parameters[name] = p

    away = {k: nn.Parameter(p.to("meta")) for k, p in there.items()}
    own = module.forward

    def forward(*inputs, **options):
        put(there)
        try:
            return own(*inputs, **options)
        finally:
            put(away)

    put(away)
    if by == "forward":
        module.forward = forward
    else:
        module.register_forward_pre_hook(lambda *_: put(there))
        module.register_forward_hook(lambda *_: put(away))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["forward", "hooks"])
def test_offloaded_parameters(kind, by):
    m, whole = models_of(kind, tie_embeddings=by == "hooks")
    for module in owners(m).values():
        offload(module, by)
    tokens = token_ids(2, 9)
    with torch.no_grad():
        for a, b in (
            (m(tokens)[0], whole(tokens)[0]),
            (m.loss(tokens), whole.loss(tokens)),
            (m.token_losses(*2 * [tokens]), whole.token_losses(*2 * [tokens])),
        ):
            torch.testing.assert_close(a, b, **DOUBLE)
    found, want = (x.generate(tokens[0], 3)[0] for x in (m, whole))
    assert found.equal(want)


def pruned(module):
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(module.weight.shape, generator=generator) < 0.5
    prune.custom_from_mask(module, "weight", mask)
    return lambda module: prune.remove(module, "weight")


def normed(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(module)
    return nn.utils.remove_weight_norm


@pytest.mark.parametrize("change", [pruned, normed])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_a_hook_renews(kind, change):
    """In training, and after each step, of the head and of convolutions."""
    m, _ = models_of(kind)
    if kind == "mlstm":  # a row of zeros has no direction
        nn.init.normal_(m.blocks[0].layer.gates.weight)
    touched = {
        name: change(module)
        for name, module in m.named_modules()
        if isinstance(module, nn.Linear | ShortConvolution)
    }
    optimizer = torch.optim.SGD(m.parameters(), lr=1)
    tokens = token_ids(2, 9)
    for _ in range(2):
        optimizer.zero_grad()
        m.loss(tokens).backward()
        optimizer.step()
    found = m(tokens)[0]
    for name, finish in touched.items():
        module = m.get_submodule(name)
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
        finish(module)
    torch.testing.assert_close(m(tokens)[0], found, **DOUBLE)


@pytest.mark.parametrize("kind", KINDS)
def test_linears_that_are_quantised(kind):
    m = make_model((kind,), num_layers=1).eval()
    tokens = token_ids(2, 9)
    want = m(tokens)[0], m.loss(tokens), m.generate(tokens[0], 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = torch.ao.quantization.quantize_dynamic(m, {nn.Linear})
    found = m(tokens)[0], m.loss(tokens), m.generate(tokens[0], 3)
    assert (found[0] - want[0]).abs().max() < 0.15 * want[0].abs().max()
    assert abs(found[1] - want[1]) < 0.02
    assert len(found[2][0]) == 3


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("qk_l2norm", [True, False])
def test_a_convolution_that_somebody_watches(qk_l2norm, activation):
    options = {"qk_l2norm": qk_l2norm, "activation": activation}
    m = HeadsConvolution((1, 2), (4, 6), bias=True, **options).double()
    x = torch.randn(2, 9, 20, dtype=torch.float64)
    want = m(x)
    m.short_convolution.register_forward_hook(lambda *_: None)
    for a, b in zip(m(x), want, strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)


def test_adapters_count_in_a_compiled_step():
    torch._dynamo.reset()
    m, merged = models_of("gated_deltanet")
    for i, module in enumerate(m.modules()):
        if isinstance(module, nn.Linear):
            adapt(module, i)
    tokens = token_ids(2, 9)
    want = m.loss(tokens)
    assert abs(want - merged.loss(tokens)) > 1e-4
    m.compile(backend="eager")
    torch.testing.assert_close(m.loss(tokens), want, **DOUBLE)
    torch._dynamo.reset()
