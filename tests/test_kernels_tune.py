"""Stages under other launch settings, in the interpreter."""

import pytest

pytest.importorskip("triton")

from inputs import member

from fastweights.kernels import settings, tune
from fastweights.kernels.call import Call
from fastweights.kernels.tile import INTERPRETED

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="without a GPU it takes the interpreter"
)


def test_neighbours_change_one_setting():
    own = {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 2}
    first, *others = tune.neighbours(own, 64, {"BK": 128, "BV": 128})
    assert first == own
    assert len(others) == 6 and all(
        len(own.items() ^ x.items()) in (1, 2) for x in others
    )
    assert not any(x["BK"] > 64 for x in tune.neighbours(own, 64, {"BV": 128}))
    bound = own | {"maxnreg": 168}
    assert own in tune.neighbours(bound, 64, {"BV": 128})


@pytest.mark.parametrize(
    "gate, rule", [("none", "additive"), ("vector", "delta")]
)
def test_every_stage_under_other_settings(gate, rule):
    """The settings reach the launch, and afterwards the rule's are back."""
    x = member(gate, rule, T=40, K=33, V=33)
    names = ("q", "k", "v", "g", "beta")
    call = Call(
        *(x[n].float() if n in x else None for n in names), None, None, 1.0, 16
    )
    used = []

    def timeit(fn):
        fn()
        used.append(settings.launch_options)
        return 1e-3

    before = settings.launch_options
    rows = list(tune.tune(call, timeit))
    assert settings.launch_options is before
    there = {"scan", "chunk_states", "scan_backward", "intra_backward"}
    assert {r["stage"] for r in rows} == there | (
        {"intra"} if rule == "delta" else set()
    )
    for stage in there:
        mine = [r for r in rows if r["stage"] == stage]
        assert [r["own"] for r in mine] == [True] + [False] * (len(mine) - 1)
    assert before not in used


def test_segments_are_a_stage_where_there_are_some(monkeypatch):
    target = "fastweights.kernels.call.num_segments"
    monkeypatch.setattr(target, lambda *_: 2)
    x = member("scalar", "delta", T=40, K=33, V=33)
    names = ("q", "k", "v", "g", "beta")
    call = Call(
        *(x[n].float() if n in x else None for n in names), None, None, 1.0, 16
    )
    assert "segments" in tune.stages(call)
