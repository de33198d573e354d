"""What `import fastweights` costs beside torch, which it needs anyway."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from touched import imported

SECONDS = 0.2
HEAVY = (
    "triton",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "safetensors",
    "tokenizers",
)
# What the recurrences stand under; each imports those before it.
ABOVE = (
    "layers",
    "models",
    "tasks",
    "corpus",
    "training",
    "planted",
    "learned",
    "train",
    "experiments",
    "comparison",
    "bench_cpu",
    "bench_deep",
    "bench_layer",
    "bench_trained",
    "bench_growth",
    "bench",
)
ROOT = Path(__file__).resolve().parent.parent / "src" / "fastweights"
SCRIPT = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
import fastweights
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def test_importing_the_library_is_quick_and_brings_no_compiler():
    """In CPU time, which does not count what else the machine does."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, modules = json.loads(run.stdout)
    assert "fastweights" in modules
    assert not [name for name in modules if name in HEAVY]
    above = tuple(f"fastweights.{name}" for name in ABOVE)
    assert not [name for name in modules if name.startswith(above)]
    assert seconds <= SECONDS


def test_programs_ask_for_nothing_heavy_before_they_need_it():
    script = (
        "import sys, fastweights.train, fastweights.experiments;"
        "print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "fastweights.models" in run.stdout.split()
    assert not set(HEAVY) & set(run.stdout.split())


@pytest.mark.parametrize("name", ["the rest", *ABOVE])
def test_imports_point_one_way(name):
    """Models use layers, layers use the family, and never back."""
    files = []
    for file in ROOT.rglob("*.py"):
        first = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if name == (first if first in ABOVE else "the rest"):
            files.append(file)
    assert files
    later = ABOVE[ABOVE.index(name) + 1 :] if name in ABOVE else ABOVE
    for file in files:
        for module in imported(file):
            parts = [*module.split("."), ""]
            assert parts[0] != "fastweights" or parts[1] not in later, file


WITHOUT = """
import sys
sys.modules["triton"] = None  # as if not installed
import torch
import fastweights as fw
from fastweights.models import LanguageModel, ModelConfig

q, k, v = torch.randn(3, 1, 20, 2, 8, requires_grad=True).unbind()
o, state = fw.linear_attention(q, k, v)
o.sum().backward()
with torch.no_grad():
    fw.decode_step(q[:, :1], k[:, :1], v[:, :1], state=state.detach())
kinds = ("gated_deltanet", "softmax", "mamba", "mlstm", "lact", "mesanet")
model = LanguageModel(ModelConfig(17, 64, len(kinds), pattern=kinds))
model(torch.arange(12)[None])[0].sum().backward()
try:
    fw.linear_attention(q, k, v, backend="triton")
except ValueError as error:
    print(error)
"""


def test_a_cpu_needs_no_triton():
    """PyTorch's builds for CPUs bring none."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "which needs the package triton" in run.stdout
