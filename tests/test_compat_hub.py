"""The operators as the package ``kernels`` loads them into transformers."""

import importlib.util
import inspect
import json

import pytest
import torch

from fastweights import compat
from fastweights.checks import relative_error
from fastweights.compat import hub
from fastweights.ops import record_backends

pytest.importorskip("transformers")
from test_compat import MODULES, modeling

OPERATORS = [
    ("qwen3_next", "torch_chunk_gated_delta_rule"),
    ("qwen3_next", "torch_recurrent_gated_delta_rule"),
    ("kimi_linear", "chunk_kimi_delta_attention"),
    ("kimi_linear", "recurrent_kimi_delta_attention"),
]


def layer(name):
    return getattr(hub.layers, name)()


@pytest.fixture
def folder(tmp_path, capsys):
    assert hub.main([str(tmp_path / "kernel")]) == 0
    assert "chunk_kda" in capsys.readouterr().out
    return tmp_path / "kernel"


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_variant_is_imported_by_its_path(folder, backend):
    """As kernels does: under its id, which is a name of its own."""
    variant = folder / "build" / f"torch-{backend}"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"] == {"type": backend}
    assert metadata["id"].isidentifier() and backend in metadata["id"]
    spec = importlib.util.spec_from_file_location(
        metadata["id"], variant / "__init__.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert vars(module.layers) == vars(hub.layers)


def test_layers_fit_the_functions_that_they_stand_for():
    """What kernels checks: no member but forward, parameters of one kind."""
    seen = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for own, (function, _) in compat.MODELS[name].items():
            convolution = own.startswith("causal_conv1d")
            title = own if convolution else function.__name__
            if title not in vars(hub.layers):
                continue
            made = getattr(hub.layers, title)
            members = set(dir(made)) - set(dir(torch.nn.Module))
            assert members == {"can_torch_compile", "has_backward"}
            assert made.can_torch_compile and made.has_backward
            kinds, others = (
                [x.kind for x in inspect.signature(f).parameters.values()]
                for f in (made.forward, getattr(module, own))
            )
            assert kinds[1:] == others, (name, own)
            seen.add(title)
    assert seen == vars(hub.layers).keys()


@pytest.mark.parametrize("model, own", OPERATORS)
def test_operators_compute_what_transformers_does(model, own):
    torch.manual_seed(0)
    table = compat.MODELS[modeling(model).__name__]
    made = layer(table[own][0].__name__)
    by_channel = model == "kimi_linear"
    q, k, v = torch.randn(3, 2, 9, 4, 8).unbind()
    g = -torch.rand(2, 9, 4, 8) if by_channel else -torch.rand(2, 9, 4)
    given = q, k, v, g, torch.rand(2, 9, 4)
    named = {
        "initial_state": torch.randn(2, 4, 8, 8),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    theirs = inspect.unwrap(getattr(modeling(model), own))
    want = theirs(*given, **named)
    run = torch.compile(made, fullgraph=True, backend="eager")
    for call in (made, run):
        with record_backends() as ran:
            found = call(*given, position_ids=None, **named)
        assert len(ran) == 1
        for x, y in zip(found, want, strict=True):
            assert relative_error(x, y) < 1e-5


def test_convolutions_compute_what_transformers_does():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 6, 9), torch.randn(6, 4), torch.randn(6)
    module = modeling("qwen3_next")
    given = x, weight, bias, "silu"
    want = inspect.unwrap(module.causal_conv1d_fn)(*given)
    found = layer("causal_conv1d_fn")(*given, position_ids=None)
    assert relative_error(found, want) < 1e-6
    before = torch.randn(2, 6, 4)
    states = before.clone(), before.clone()
    own = inspect.unwrap(module.causal_conv1d_update)
    want = own(x, states[0], weight, bias, "silu")
    found = layer("causal_conv1d_update")(x, states[1], weight, bias, "silu")
    assert relative_error(found, want) < 1e-6
    assert torch.equal(*states) and not torch.equal(states[0], before)


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        hub.main([str(tmp_path / "file")])
    assert "FOLDER: got the file" in capsys.readouterr().err


def test_kernels_puts_them_into_a_module(folder):
    """Where the package is installed; transformers need not accept it."""
    kernels = pytest.importorskip("kernels")

    def chunk_kda(
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **others,
    ):
        raise AssertionError("not replaced")

    function = kernels.use_kernel_forward_from_hub("chunk_kda")(chunk_kda)

    @kernels.use_kernelized_func(function)
    class Layer(torch.nn.Module):
        def forward(self, *given):
            return function(*given)[0]

    ours = kernels.LocalLayerRepository(folder, layer_name="chunk_kda")
    made, mode = Layer(), kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping({"chunk_kda": {"cpu": ours}}):
        kernels.kernelize(made, mode=mode, device="cpu")
    q, k, v, g = torch.randn(4, 1, 20, 2, 8).unbind()
    given = q, k, v, -g.abs(), torch.rand(1, 20, 2)
    want, _ = compat.fla.chunk_kda(*given)
    run = torch.compile(made, fullgraph=True, backend="eager")
    assert torch.equal(run(*given), want)
