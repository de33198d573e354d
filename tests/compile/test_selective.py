"""The selective scan's kernels as they ship, for GPUs that are not here."""

from crossed import crossed
from offline import OTHERS, SHARED, build, judge

from fastweights.kernels import selective

KERNELS = {
    "fwd": selective.selective_fwd_kernel,
    "bwd": selective.selective_bwd_kernel,
}
SINGLE = ("dt", "A", "skip", "initial_state", "state", "states", "dstate")
SINGLE += ("ddt", "dA", "dB", "dC", "dskip", "dinitial")


def compile_kernel(name, capability, dtype="bf16", D=2048, N=16, G=None):
    """A kernel with its launch settings; dt, A and D are fp32.

    Of packed sequences if it has G groups, else of a batch.
    """
    groups = G or 1
    constants = {"D": D, "N": N, "G": groups}
    constants |= selective.options(D, N, groups)
    types = dict.fromkeys(SINGLE, "*fp32")
    types |= {"T": "i32", "num_tokens": "i32", "cu_seqlens": "*i32"}
    if G is None:
        constants["cu_seqlens"] = None
    return build(KERNELS[name], capability, dtype, constants, types)


@crossed(
    seldom=[str(x) for x in OTHERS],
    capability=[*SHARED],
    dtype=["bf16", "fp32"],
    name=[*KERNELS],
)
def test_nothing_spills(name, capability, dtype, tmp_path):
    compiled = compile_kernel(name, capability, dtype)
    judge(compiled, capability, tmp_path, spilled=0)


SIZES = [(1, 1), (48, 5, 3), (768, 64, 1), (2048, 256), (2048, 16, 2)]


@crossed(sizes=SIZES, name=[*KERNELS], capability=[86, 90])
def test_other_sizes(name, sizes, capability, tmp_path):
    """The tuple is D, N, and G of packed sequences."""
    compiled = compile_kernel(name, capability, "bf16", *sizes)
    judge(compiled, capability, tmp_path, spilled=0)
