"""The tests that depend on PyTorch's and Triton's versions, on another pair.

``python tools/pairs.py oldest``, or ``newest``: the ends of
torch_internals.TESTED, as PyPI has them, in an environment of their own under
build/pairs, which is made if it is not there. What follows goes to pytest:
``-k``, ``-n``, files.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

from fastweights.torch_internals import TESTED

ROOT = Path(__file__).resolve().parent.parent
ENDS = ("oldest", "newest")
# Triton 3.6's interpreter counts in arrays of one element, which numpy 2.4
# does not take for numbers.
BESIDES = {"oldest": ["numpy<2.4"], "newest": ["numpy"]}
TOOLS = ["beartype", "hypothesis", "jaxtyping", "pytest", "pytest-xdist"]
# With Triton's compiler, and with its interpreter, in processes of their own.
COMPILED = (
    "compile",
    "ops",
    "deep/test_chunk_loop.py",
    "layers/test_causal_attention.py",
    "ops/test_decode_step.py",
    "test_torch_internals.py",
)
INTERPRETED = ("kernels",)


def requirements(end: str) -> list[str]:
    """What pip installs for one end of the tested versions."""
    pair = [
        f"{name}=={'.'.join(map(str, versions[ENDS.index(end)]))}.*"
        for name, versions in TESTED.items()
    ]
    return [*pair, *BESIDES[end], *TOOLS]


def environment(end: str) -> Path:
    """The Python of an environment that has them."""
    folder = ROOT / "build" / "pairs" / end
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *requirements(end)], check=True)
        ready.touch()
    return python


def main(end: str, *arguments: str) -> int:
    python = environment(end)
    failed = 0
    interpreter = {"TRITON_INTERPRET": "1"}
    for files, mode in ((COMPILED, {}), (INTERPRETED, interpreter)):
        named = [x for x in arguments if x.endswith(".py")]
        chosen = [x for x in named if x.startswith(files)] if named else files
        if not chosen:
            continue
        added = {
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
        } | mode
        rest = [x for x in arguments if x not in named]
        command = [python, "-m", "pytest", "-q", *rest]
        command += [f"tests/{x}" for x in chosen]
        run = subprocess.run(command, cwd=ROOT, env=os.environ | added)
        failed += run.returncode not in (0, 5)  # 5: -k left nothing
    return failed


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ENDS:
        sys.exit(f"usage: python tools/pairs.py {'|'.join(ENDS)} [pytest's]")
    sys.exit(main(*sys.argv[1:]))
