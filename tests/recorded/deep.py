"""Record what public code computes, for tests/deep/test_published_networks.py.

    PYTHONPATH= python tests/recorded/deep.py FOLDER

with these repositories in FOLDER, at these commits, all under MIT:

    ttt-lm-pytorch (test-time-training)           cd831db
    LaCT (a1600012888)                            1f84d47
    titans-pytorch (lucidrains)                   cc016eb
    flash-linear-attention (fla-org)              bc3b101

(LaCT's layer with a norm, rotary positions and an attention of PyTorch in
place of flash-linear-attention's and flash-attn's, which need a GPU) and
transformers, einops, einx, tensordict and assoc-scan installed. Inputs
and weights are drawn in fp32, and everything is computed from them in fp64:
where the code asks for fp32 or bf16 the line is changed as it is loaded.
Outputs and gradients become one JSON file each beside this script.
"""

import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from layers import HERE, pack

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
B, H = 2, 2


def load_module(path: str, **changes: str) -> types.ModuleType:
    """The module in this file, with some of its text replaced."""
    text = (FOLDER / path).read_text()
    for old, new in changes.values():
        assert old in text, old
        text = text.replace(old, new)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(text)
        file.flush()
        spec = importlib.util.spec_from_file_location("public", file.name)
        module = importlib.util.module_from_spec(spec)
        sys.modules["public"] = module
        spec.loader.exec_module(module)
    return module


def draw(*shape: int, low: float | None = None) -> torch.Tensor:
    """Numbers that fp32 holds, in fp64; uniform from low to 1 if given."""
    x = torch.randn(shape) if low is None else torch.rand(shape)
    x = x if low is None else low + (1 - low) * x
    return x.double().requires_grad_()


def save(name: str, source: str, o, inputs: dict, **more) -> None:
    """Output, and the gradients of the sum of its squares."""
    slopes = ()
    if o.requires_grad:
        slopes = torch.autograd.grad(o.square().sum(), [*inputs.values()])
    record = {
        "source": source,
        "versions": f"torch {torch.__version__}",
        "command": "python tests/recorded/deep.py FOLDER",
        **more,
        "inputs": {k: pack(x) for k, x in inputs.items()},
        "o": pack(o),
        "gradients": {
            k: pack(d) for k, d in zip(inputs, slopes, strict=False)
        },
    }
    text = json.dumps(record, indent=1)
    (HERE / f"{name}.json").write_text(text + "\n")
    print(f"{name:20} {len(text) / 1000:.1f} kB, |o| {o.std():.2f}")


def ttt(kind: str) -> None:
    """A whole layer, with a mini-batch of 3 at the end."""
    module = load_module("ttt-lm-pytorch/ttt.py")
    config = module.TTTConfig(
        hidden_size=8,
        num_attention_heads=H,
        mini_batch_size=4,
        ttt_base_lr=1.0 if kind == "linear" else 0.1,
        ttt_layer_type=kind,
    )
    torch.manual_seed(0)
    make = module.TTTLinear if kind == "linear" else module.TTTMLP
    layer = make(config, 0)
    with torch.no_grad():
        for key, p in layer.named_parameters():
            scale = 0.05 if key == "learnable_token_idx" else 0.4
            p.copy_(scale * torch.randn_like(p) + ("norm_w" in key))
    layer.double()
    x = draw(B, 11, 8)
    at = torch.arange(11)[None].expand(B, 11)
    save(
        f"ttt_{kind}",
        f"ttt-lm-pytorch cd831db, ttt.py, {make.__name__}",
        layer(x, position_ids=at),
        {"x": x, **dict(layer.named_parameters())},
    )


def lact(name: str, muon: bool, momentum: bool, prenorm: bool = False):
    module = load_module(
        "LaCT/lact_llm/lact_model/ttt_operation.py",
        newton_schulz=("G.bfloat16()", "G"),
        in_place=("inplace=True", "inplace=False"),
    )
    torch.manual_seed(0)
    K, N, V, T, C = 4, 5, 3, 11, 4
    inputs = {
        "w0": draw(B, N, K),
        "w1": draw(B, V, N),
        "w2": draw(B, N, K),
        "q": draw(B, T, K),
        "k": draw(B, T, K),
        "v": draw(B, T, V),
        "lr0": draw(B, T, 1, low=0.0),
        "lr1": draw(B, T, 1, low=0.0),
        "lr2": draw(B, T, 1, low=0.0),
    }
    m = draw(B, T, 1, low=0.0)
    more = {"momentum": m} if momentum else {}
    run = (
        module.prenorm_block_causal_lact_swiglu
        if prenorm
        else module.block_causal_lact_swiglu
    )
    o = run(*inputs.values(), chunk_size=C, use_muon=muon, **more)
    source = f"LaCT 1f84d47, lact_model/ttt_operation.py, {run.__name__}"
    save(name, source, o, inputs | more, chunk=C)


def window_attention(q, k, v, causal, window_size):
    """flash_attn_func's, written out: [B, T, H, K]."""
    T, (before, after) = q.shape[1], window_size
    assert causal and after == 0
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = (distance >= 0) & (distance <= before)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    return o.transpose(1, 2)


class Rotary(torch.nn.Module):
    """flash-linear-attention's: pairs half a head apart."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.rates = base ** (-torch.arange(0, dim, 2).double() / dim)

    def forward(self, q, k, seqlen_offset, max_seqlen, cu_seqlens):
        angle = torch.arange(q.shape[1])[:, None, None] * self.rates

        def turned(x):
            a, b = x.chunk(2, -1)
            cos, sin = angle.cos(), angle.sin()
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return turned(q), turned(k)


class Norm(torch.nn.RMSNorm):
    def __init__(self, size: int, elementwise_affine: bool = True) -> None:
        super().__init__(size, eps=1e-5)


def lact_layer() -> None:
    """The whole layer, pre-norm, with momentum and Muon in fp64."""
    operation = load_module(
        "LaCT/lact_llm/lact_model/ttt_operation.py",
        newton_schulz=("G.bfloat16()", "G"),
        in_place=("inplace=True", "inplace=False"),
    )
    nothing = types.SimpleNamespace()
    for name in ("postnorm", "prenorm"):
        fused = f"{name}_block_causal_lact_swiglu_fused_kernel_triton"
        setattr(nothing, fused, None)
    stubs = {
        "lact_operation": operation,
        "lact_fused": nothing,
        "fla": types.SimpleNamespace(),
        "fla.models": types.SimpleNamespace(),
        "fla.models.utils": types.SimpleNamespace(Cache=None),
        "fla.modules": types.SimpleNamespace(
            RMSNorm=Norm, RotaryEmbedding=Rotary
        ),
    }
    sys.modules.update(stubs)
    module = load_module(
        "LaCT/lact_llm/lact_model/layer_lact_swiglu.py",
        operation=("from .ttt_operation import", "from lact_operation import"),
        fused=(
            "from .ttt_operation_fused_kernel import",
            "from lact_fused import",
        ),
        fp64=("lr.float()", "lr"),
        momentum=("(hidden_states).float()", "(hidden_states)"),
    )
    module.flash_attn_func = window_attention
    torch.manual_seed(0)
    layer = module.LaCTSWIGLULayer(
        hidden_size=8,
        num_attn_heads=4,
        num_lact_heads=2,
        inter_multi=1.5,
        window_size=5,
        lact_chunk_size=4,
        use_muon=True,
        learnable_ttt_scale=True,
        ttt_prenorm=True,
        rope_theta=100.0,
        use_momentum=True,
    )
    with torch.no_grad():
        for key, p in layer.named_parameters():
            p.copy_(0.5 * torch.randn_like(p) + ("norm.weight" in key))
    layer.double()
    x = draw(B, 11, 8)
    save(
        "lact_layer",
        "LaCT 1f84d47, lact_model/layer_lact_swiglu.py, LaCTSWIGLULayer",
        layer(x)[0],
        {"x": x, **dict(layer.named_parameters())},
    )


def titans() -> None:
    """NeuralMemory as it comes: a LayerNorm and a residual, xavier, GELU."""
    sys.path.insert(0, str(FOLDER / "titans-pytorch"))
    from titans_pytorch.neural_memory import NeuralMemory

    torch.manual_seed(0)
    layer = NeuralMemory(
        4, chunk_size=3, default_model_kwargs={"depth": 2}, batch_size=None
    ).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p.float())
    x = draw(B, 11, 4)
    named = {k: p for k, p in layer.named_parameters() if p.requires_grad}
    used = {k: p for k, p in named.items() if "memory_model." not in k}
    o, _ = layer(x)
    source = "titans-pytorch cc016eb, neural_memory.py, NeuralMemory"
    save("titans_lucidrains", source, o, {"x": x, **used}, chunk=3)


def fla_ttt() -> None:
    """The reference of another library, which differs: see the test."""
    module = load_module(
        "flash-linear-attention/fla/ops/ttt/naive.py",
        fp64=("torch.float32", "torch.float64"),
    )
    torch.manual_seed(0)
    T, K = 8, 4
    inputs = {
        "q": draw(B, T, H, K),
        "k": draw(B, T, H, K),
        "v": draw(B, T, H, K),
        "w": draw(H, K, low=0.5),
        "b": draw(H, K),
        "eta": draw(B, T, H, 1, low=0.0),
    }
    with torch.no_grad():
        o, *_ = module.chunk_ttt_linear_ref(
            *(x.clone() for x in inputs.values()), scale=1.0, mini_batch_size=4
        )
    save(
        "ttt_flash_linear_attention",
        "flash-linear-attention bc3b101, ops/ttt/naive.py",
        o,
        inputs,
    )


def mesa() -> None:
    module = load_module(
        "flash-linear-attention/fla/ops/mesa_net/naive.py",
        fp64=(".float()", ".double()"),
        zeros=("device=q.device", "device=q.device, dtype=q.dtype"),
    )
    torch.manual_seed(0)
    T, K = 11, 4
    inputs = {
        "q": draw(B, T, H, K),
        "k": draw(B, T, H, K),
        "v": draw(B, T, H, K),
        "g": draw(B, T, H, low=-1.0),
        "lamb": draw(H, K, low=0.25),
        "beta": draw(B, T, H, low=0.0),
    }
    with torch.no_grad():
        inputs["g"].clamp_(max=-0.01)
    o, _, _ = module.naive_mesa_net_exact(*inputs.values())
    source = "flash-linear-attention bc3b101, ops/mesa_net/naive.py, exact"
    save("mesa_exact", source, o, inputs)


if __name__ == "__main__":
    ttt("linear")
    ttt("mlp")
    lact("lact_muon", muon=True, momentum=True)
    lact("lact_plain", muon=False, momentum=False)
    lact("lact_prenorm", muon=True, momentum=True, prenorm=True)
    lact_layer()
    titans()
    fla_ttt()
    mesa()
