"""The family's kernels as far as the first IR of the oldest Triton tested.

    make build/oldest_triton/.made
    PYTHONPATH=build/oldest_triton:src python tools/oldest_triton.py

Each Triton reads Python in its own way, and what one of them refuses shows
here, in some twenty seconds; ``tools/pairs.py oldest`` compiles to the end.
"""

import itertools
import sys
from operator import getitem
from pathlib import Path

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from fastweights.kernels.gpu import GPU
from fastweights.kernels.recurrence import stages
from fastweights.kernels.recurrence.settings import CallKind
from fastweights.torch_internals import TESTED

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.offline import SHARED_MEMORY, source_of
from support.pairwise import pairwise

RULES = (False, False), (True, False), (True, True)  # delta, erase
# Each member of the family with each of the rest, and all pairs of these.
AXES = (
    [*itertools.product((0, 1, 128), RULES)],
    (torch.bfloat16, torch.float16, torch.float32),
    (None, torch.float32),
    (None, torch.int64),
)
TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)


def read(one) -> None:
    """Triton's first IR of a launch; raises what Triton raises."""
    source = source_of(one)
    options = BACKEND.parse_options(dict(one.options))
    context = ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    source.make_ir(
        TARGET,
        options,
        BACKEND.get_codegen_implementation(options),
        BACKEND.get_module_map(),
        context,
    )


def main() -> None:
    oldest = TESTED["triton"][0]
    found = tuple(map(int, triton.__version__.split(".")[:2]))
    assert found == oldest, f"triton: got {found}, need {oldest}"
    number, failed = 0, []
    for case in pairwise([range(len(axis)) for axis in AXES]):
        member, dtype, state, offsets = map(getitem, AXES, case)
        gate, (delta, erase) = member
        gpu, fp32 = GPU(SHARED_MEMORY[90], 132, (9, 0)), torch.float32
        sizes, rule = (2, 4, 128, 128), (gate, delta, 64, "tf32", erase)
        kind = CallKind(gpu, dtype, *sizes, *rule)
        beta = fp32 if delta and not erase else None
        strengths = fp32 if gate else None, beta, dtype if erase else None
        tensors = dtype, dtype, dtype, *strengths, state, offsets
        dtypes = stages.CallTensors(*tensors)
        launches = stages.forward_schedule(kind, dtypes, True).launches
        dtypes = dtypes._replace(do=dtype, dstate=state)
        back = stages.backward_schedule(kind, dtypes, True)
        for one in launches + back.launches:
            number += 1
            try:
                read(one)
            except Exception as error:
                failed.append(f"{one.kernel.__name__} of {kind}: {error}")
    print("\n\n".join(failed))
    print(f"{number - len(failed)} launches read, {len(failed)} refused")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
