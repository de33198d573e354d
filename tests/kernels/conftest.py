"""Kernels run in Triton's interpreter, or compiled, with the mark gpu."""

from importlib.util import find_spec

import pytest

if not find_spec("triton"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreted_or_compiled(request, empty_is_nan):
    from fastweights.kernels.tile import INTERPRETED

    compiled = request.node.get_closest_marker("gpu") is not None
    if compiled == INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1; with the mark gpu, none")
