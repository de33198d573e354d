"""transformers' models in bf16 on a GPU, beside FLA's operators in them.

The measure is the same model in fp32 with transformers' own functions. From
it ours is at most as far, up to noise, as those functions are in bf16, and as
FLA's are where that package is installed.
"""

import contextlib
import copy
import functools
import importlib.util
import inspect

import pytest
import torch

import fastweights as fw
from fastweights.checks import relative_error
from fastweights.compat import transformers as ours
from fastweights.ops.common.backends import record_backends

pytest.importorskip("transformers")
from support.compat_cases import (
    GDN,
    LAYERS,
    SIZES,
    TINY_MODELS,
    modeling,
    with_spread_gates,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

WIDER = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
}
HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
DENSE = ("qwen3_5", "olmo_hybrid")
NOISE = 1.2


@functools.cache
def tiny_model(name):
    """Three layers in fp32 on the GPU, its gates from slow to fast."""
    torch.manual_seed(0)
    prefix, options = TINY_MODELS[name]
    if options.items() >= GDN.items():
        options = options | HEADS
    elif "linear_head_dim" in options:
        options = options | {"linear_head_dim": 128}
    made = getattr(modeling(name), f"{prefix}ForCausalLM")
    options = SIZES | {"layer_types": LAYERS} | options | WIDER
    m = made(made.config_class(**options)).cuda()
    return with_spread_gates(m)


def errors_of(found, wanted):
    """Of logits and of gradients."""
    return tuple(map(relative_error, found, wanted))


def train(m):
    """Logits, and the gradients of a loss of them, in fp32."""
    tokens = torch.arange(2 * 700, device="cuda").view(2, 700) ** 2 % 253 + 2
    m.zero_grad()
    logits = m(tokens, use_cache=False).logits.float()
    logits.square().mean().backward()
    grads = [x.grad for x in m.parameters() if x.grad is not None]
    return logits.detach(), torch.cat([x.flatten().float() for x in grads])


@contextlib.contextmanager
def in_pytorch(name):
    """transformers' own functions, FLA installed or not."""
    module, patch = modeling(name), pytest.MonkeyPatch()
    for key in ours.GATED_DELTANET | ours.KDA | ours.CONVOLUTION:
        if hasattr(module, key):
            patch.setattr(module, key, inspect.unwrap(getattr(module, key)))
    yield
    patch.undo()


def skip_tuning(monkeypatch):
    """Triton takes the first setting of each kernel: tuning takes minutes."""
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def first(self, *args, **options):
        self.configs = self.configs[:1]
        return run(self, *args, **options)

    monkeypatch.setattr(Autotuner, "run", first)


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"]
)
def test_as_near_to_fp32_as_others_in_bf16(name, monkeypatch):
    low, errors = copy.deepcopy(tiny_model(name)).bfloat16(), {}
    with in_pytorch(name):
        wanted = train(tiny_model(name))
        errors["PyTorch"] = errors_of(train(low), wanted)
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.common import chunk_o

        # Its guard against a backward that is miscompiled at other sizes.
        monkeypatch.setattr(chunk_o, "TRITON_ABOVE_3_7_1", True)
        skip_tuning(monkeypatch)
        errors["FLA"] = errors_of(train(low), wanted)
    with fw.patch_transformers(), record_backends() as ran:
        ours = errors_of(train(low), wanted)
    assert ran.count("triton forward") == ran.count("triton backward") >= 4
    print(name, "ours", ours, errors)
    for who, theirs in errors.items():
        for mine, other in zip(ours, theirs, strict=True):
            assert mine <= NOISE * other, (who, ours, theirs)


@pytest.mark.parametrize("name", DENSE)
def test_in_fp32_it_is_the_same_model(name):
    with in_pytorch(name):
        want, wanted = train(tiny_model(name))
    with fw.patch_transformers():
        got, grads = train(tiny_model(name))
    assert relative_error(got, want) < 1e-4
    assert relative_error(grads, wanted) < 1e-4


@pytest.mark.parametrize("name", DENSE)
def test_generates_and_compiles(name):
    """A static cache under torch.compile writes what the eager one does."""
    import transformers

    m = tiny_model(name)
    prompt = torch.arange(9, device="cuda")[None] + 2
    options = {"max_new_tokens": 32, "do_sample": False}
    with fw.patch_transformers(), record_backends() as ran:
        want = m.generate(prompt, **options)
        assert any(x.startswith("triton") for x in ran)
        torch._dynamo.reset()
        got = m.generate(
            prompt,
            cache_implementation="static",
            compile_config=transformers.CompileConfig(
                fullgraph=True, mode=None
            ),
            **options,
        )
    assert torch.equal(got, want)
