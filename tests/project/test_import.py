"""What `import fastweights` costs beside torch, which it needs anyway."""

import json
import re
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
ROOT = Path(__file__).resolve().parents[2]
# DESIGN.md lists the floors, the lowest first.
[LISTED] = re.findall(
    r"^## The floors$.*?^```\n(.*?)^```$",
    (ROOT / "DESIGN.md").read_text("utf-8"),
    re.M | re.S,
)
FLOORS = tuple(line.split()[0] for line in LISTED.splitlines())
DOORS = tuple(
    f"fastweights/{name}.py" for name in ("__init__", "__main__", "train")
)
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
    above = ("fastweights.layers", "fastweights.models", "fastweights_lab")
    assert not [name for name in modules if name.startswith(above)]
    assert seconds <= SECONDS


def test_programs_ask_for_nothing_heavy_before_they_need_it():
    script = (
        "import sys\n"
        "import fastweights_lab.commands.train, fastweights_lab.experiments\n"
        "from fastweights_lab.notebook import film, plotting\n"
        "print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "fastweights.models" in run.stdout.split()
    assert not {*HEAVY, "matplotlib"} & set(run.stdout.split())


def floor_of(path: str) -> int | None:
    """The floor's number, of a path or a dotted name's; None: of no floor."""
    parts = path.removesuffix(".py").split("/")
    for number, floor in enumerate(FLOORS):
        if parts[: floor.count("/") + 1] == floor.split("/"):
            return number
    return None


def test_every_module_stands_on_a_floor():
    for file in (ROOT / "src").rglob("*.py"):
        path = file.relative_to(ROOT / "src").as_posix()
        if path not in DOORS and not path.startswith("fastweights_lab/__"):
            assert floor_of(path) is not None, path
    for floor in FLOORS:
        file = ROOT / "src" / floor
        assert file.is_dir() or file.with_suffix(".py").is_file(), floor


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_point_down(floor):
    """Each floor uses itself and those below: models layers, never back."""
    own = FLOORS.index(floor)
    for file in (ROOT / "src").rglob("*.py"):
        path = file.relative_to(ROOT / "src").as_posix()
        if floor_of(path) != own:
            continue
        for module in imported(file):
            if (found := floor_of(module.replace(".", "/"))) is not None:
                assert found <= own, f"{path} imports {module}"


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
