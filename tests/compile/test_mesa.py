"""MesaNet's kernels as they ship, for GPUs that are not here."""

import pytest
from support.offline import LEADING, build, check_fits
from support.pairwise import parametrize_all

from fastweights.kernels import mesa

KERNELS = {"states": mesa.mesa_states_kernel, "solve": mesa.mesa_solve_kernel}


def compile_kernel(name, capability, precision, K):
    meta = mesa.meta_of(16, K, precision)
    constants = {"META": meta, "initial_state": None, "cu_seqlens": None}
    wide = name == "solve" and meta.BY_COLUMNS
    constants |= {"num_warps": 8 if wide else 4, "num_stages": 1}
    types = dict.fromkeys(("N", "T", "steps"), "i32")
    types |= {"equations": ("*fp32",) * 5}
    return build(KERNELS[name], capability, "fp32", constants, types)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("K", [64, 128])
def test_how_much_spills(name, K, tmp_path):
    """Of what half precision runs on Hopper."""
    spilled = 88 if (name, K) == ("solve", 64) else 0
    check_fits(
        compile_kernel(name, 90, "tf32", K), 90, tmp_path, spilled=spilled
    )


def test_steps_keep_their_matrix_and_multiply_once(tmp_path):
    """The matrix and keys are loaded before the loop; 64 rows, 8 warps.

    Three products per step: if both groups of four warps had all columns of
    one, the loop would have more of Hopper's instructions than these.
    """
    compiled = compile_kernel("solve", 90, "tf32", 128)
    before, _, loop = compiled.asm["ttgir"].partition("scf.for")
    assert before.count("tt.load") == compiled.asm["ttgir"].count("tt.load")
    assert loop.count("ttng.warp_group_dot ") == 3
    assert "warpsPerCTA = [8, 1]" not in "".join(
        line for line in before.splitlines() if "nvidia_mma" in line
    )


@pytest.mark.full
@parametrize_all(
    capability=LEADING, precision=["tf32", "tf32x3"], name=[*KERNELS]
)
def test_fits_where_it_is_chosen(name, capability, precision, tmp_path):
    """In fp32 heads are half as wide, and it may spill."""
    K = 64 if precision == "tf32x3" else 100
    compiled = compile_kernel(name, capability, precision, K)
    check_fits(compiled, capability, tmp_path, spilled=2**10)
