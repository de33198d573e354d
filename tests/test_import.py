"""What `import fastweights` costs beside torch, which it needs anyway."""

import json
import subprocess
import sys

SECONDS = 0.2
HEAVY = (
    "triton",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
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
    assert seconds <= SECONDS
