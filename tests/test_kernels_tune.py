"""Stages under other launch settings, in the interpreter."""

import json

import pytest
import torch

pytest.importorskip("triton")

from inputs import member

from fastweights.kernels import settings, tune
from fastweights.kernels.call import Call
from fastweights.kernels.tile import INTERPRETED

NAMES = ("q", "k", "v", "g", "beta")
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
    one = own | {"num_stages": 1}
    ahead = [x["num_stages"] for x in tune.neighbours(one, 64, {}, 1)]
    assert set(ahead) == {1}
    bound = own | {"maxnreg": 168}
    assert own in tune.neighbours(bound, 64, {"BV": 128})


@pytest.mark.parametrize(
    "gate, rule", [("none", "additive"), ("vector", "delta")]
)
def test_every_stage_under_other_settings(gate, rule):
    """The settings reach the launch, and afterwards the rule's are back."""
    x = member(gate, rule, T=20, HV=1, K=33, V=20)
    call = Call(
        *(x[n].float() if n in x else None for n in NAMES), None, None, 1.0, 16
    )
    used = []

    def timeit(fn):
        fn()
        used.append(settings.launch_table())
        return 1e-3

    before = settings.launch_table()
    rows = list(tune.tune(call, timeit))
    assert settings.launch_table() is before
    there = {"scan", "chunk_states", "scan_backward", "intra_backward"}
    assert {r["stage"] for r in rows} == there | (
        {"intra"} if rule == "delta" else set()
    )
    for stage in there:
        mine = [r for r in rows if r["stage"] == stage]
        assert [r["own"] for r in mine] == [True] + [False] * (len(mine) - 1)
    assert before not in used


def test_wrong_results_are_not_settings(monkeypatch):
    x = member("none", "additive", T=20, K=33, V=33)
    call = Call(
        *(x[n].float() if n in x else None for n in NAMES), None, None, 1.0, 16
    )
    results = iter([1.0] * 4 + [1.1] * 2 + [1.0] * 100)
    stage = {"scan": lambda: torch.full((3,), next(results))}
    monkeypatch.setattr(tune, "stages", lambda _: stage)
    with pytest.warns(UserWarning, match=r"scan float32 K=33 .* off by 1\.0e"):
        rows = list(tune.tune(call, lambda fn: 1.0))
    settings = [*tune.neighbours(options_of(rows[0]), 32, {"BV": 33})]
    assert len(rows) == len(settings) - 2


def options_of(row):
    return {name: row[name] for name in tune.OPTIONS if name in row}


def test_the_fastest_over_all_shapes_is_written(tmp_path):
    a, b, c, d = ({"num_warps": n} for n in (4, 8, 16, 32))
    rows = [
        {
            "launch": launch,
            "member": "kda",
            "shape": shape,
            **options,
            "own": options is a,
            "seconds": seconds,
        }
        for launch, shape, options, seconds in (
            ("scan", "long", a, 2.0),
            ("scan", "long", b, 1.0),  # fastest here, and slowest there
            ("scan", "long", c, 1.5),
            ("scan", "long", d, 0.1),  # not possible there
            ("scan", "gva", a, 2.0),
            ("scan", "gva", b, 9.0),
            ("scan", "gva", c, 1.9),
            ("intra", "long", a, 1.0),
            ("intra", "long", b, 0.99),  # within what such times differ by
            ("far", "long", b, 1.0),  # its own is not possible here
        )
    ]
    file = tmp_path / "launch.json"
    file.write_text('{"X": {"gate": {"num_warps": 1}}, "Y": {"scan": {}}}')
    tune.write(rows, "X", file)
    table = json.loads(file.read_text())
    assert table == {
        "X": {"far": b, "scan": c, "intra": a, "gate": {"num_warps": 1}},
        "Y": {"scan": {}},
    }


def test_the_table_comes_before_the_rule(monkeypatch):
    x = member("vector", "delta", T=20, K=33, V=33)
    call = Call(
        *(x[n].float() if n in x else None for n in NAMES), None, None, 1.0, 16
    )
    rule = call.constants("intra_backward")
    name = tune.name_of(call, "intra_backward")
    assert name == "intra_backward float32 K=33 C=16 gate=channel delta"
    changed = {"BK": 2 * rule["BK"], "BV": 64, "num_warps": 2, "num_stages": 1}
    with tune.using(call, "intra_backward", changed):
        found = call.constants("intra_backward")
        assert found.items() >= changed.items()
        # a kernel for far chunks has the key tiles that mark them
        far = call.constants("intra_backward_far")
        assert far["BK"] == changed["BK"]
        assert far["num_warps"] == 8
    assert call.constants("intra_backward") == rule


def test_segments_are_a_stage_where_there_are_some(monkeypatch):
    target = "fastweights.kernels.call.num_segments"
    monkeypatch.setattr(target, lambda *_: 2)
    x = member("scalar", "delta", T=40, K=33, V=33)
    call = Call(
        *(x[n].float() if n in x else None for n in NAMES), None, None, 1.0, 16
    )
    assert "segments" in tune.stages(call)
