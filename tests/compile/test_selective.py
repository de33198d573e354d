"""The selective scan's kernels as they ship, for GPUs that are not here."""

from support.offline import OTHERS, SHARED_MEMORY, build, check_fits
from support.pairwise import parametrize_all

from fastweights.kernels import selective

KERNELS = {
    "fwd": selective.selective_fwd_kernel,
    "bwd": selective.selective_bwd_kernel,
}


def compile_kernel(name, capability, dtype="bf16", D=2048, N=16, G=None):
    """A kernel with its launch settings; dt, A and D are fp32.

    Of packed sequences if it has G groups, else of a batch.
    """
    meta = selective.meta_of(D, N, G or 1)
    constants = selective.SETTINGS | {"META": meta}
    x, y = f"*{dtype}", "*fp32"
    types = {"inputs": (x, y, y, x, x, y), "initial_state": y, "states": y}
    types |= {"results": (x, y, y), "output_grads": (x, y)}
    types |= {"grads": (x, *[y] * 6), "cu_seqlens": "*i32"}
    types |= {"T": "i32", "num_tokens": "i32"}
    if G is None:
        constants["cu_seqlens"] = None
    return build(KERNELS[name], capability, dtype, constants, types)


@parametrize_all(
    covered_once=[str(x) for x in OTHERS],
    capability=[*SHARED_MEMORY],
    dtype=["bf16", "fp32"],
    name=[*KERNELS],
)
def test_nothing_spills(name, capability, dtype, tmp_path):
    compiled = compile_kernel(name, capability, dtype)
    check_fits(compiled, capability, tmp_path, spilled=0)


SIZES = [(1, 1), (48, 5, 3), (768, 64, 1), (2048, 256), (2048, 16, 2)]


@parametrize_all(sizes=SIZES, name=[*KERNELS], capability=[86, 90])
def test_nothing_spills_at_other_sizes(name, sizes, capability, tmp_path):
    """The tuple is D, N, and G of packed sequences."""
    compiled = compile_kernel(name, capability, "bf16", *sizes)
    check_fits(compiled, capability, tmp_path, spilled=0)
