"""What networks as fast weights cost, counted and timed."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights import deep
from fastweights_lab.bench import deep as bench_deep
from fastweights_lab.bench import deep_cost, timing
from fastweights_lab.bench.deep_cost import Cost
from fastweights_lab.program import main


def counted(function, *arguments, **options):
    """FLOPs of the products of matrices that are run."""
    with FlopCounterMode(display=False) as counter:
        function(*arguments, **options)
    return counter.get_total_flops()


B, T, H, K, C = 2, 32, 3, 4, 8


def test_flops_of_ttt():
    q, k, v = torch.randn(3, B, T, H, K)
    rate, norm = torch.rand(B, T, H), torch.rand(2, H, K).unbind()
    start = [(torch.randn(H, K, K), torch.randn(H, K))]
    found = counted(deep.ttt, q, k, v, rate, start, norm, torch.rand(C))
    assert found == deep_cost.ttt(B, T, H, K, C).flops


def test_flops_of_lact():
    q, k, v = torch.randn(3, B, T, H, K)
    rates = torch.rand(B, T, H, 3)
    start = [torch.randn(H, *s) for s in ((K, 6), (6, K), (K, 6))]
    found = counted(deep.lact, q, k, v, rates, start, chunk_size=16)
    assert found == deep_cost.lact(B, T, H, K, 6, 16).flops


def test_flops_of_mesa():
    """Of a chunk of 64, which linear attention's formula counts in too.

    PyTorch's steps sum the matrices of the chunks again, each of them.
    """
    q, k, v = torch.randn(3, B, 64, H, K)
    g, beta = torch.rand(2, B, 64, H)
    ridge = torch.rand(H, K)
    found = counted(deep.mesa, q, k, v, -g, beta, ridge, solver_steps=7)
    again = (7 - 1) * 2 * K * K * B * 64 * H
    assert found == deep_cost.mesa(B, 64, H, K, steps=7).flops + again


def test_bytes_are_those_of_tokens():
    """bf16, and rates of fp32: read once, and written once."""
    n = B * T * H
    assert deep_cost.ttt(B, T, H, K).moved == n * (4 * 2 * K + 4)
    training = deep_cost.lact(B, T, H, K, 6, training=True).moved
    # q, k, v, o; then q, k, v, do, dq, dk, dv: rates thrice
    assert training == n * (11 * 2 * K + 3 * 3 * 4)


def test_the_floor_is_what_takes_longer():
    assert Cost(6, 4).seconds(2.0, 4.0) == 3.0
    assert Cost(6, 40).seconds(2.0, 4.0) == 10.0


@pytest.mark.skipif(timing.ON_GPU, reason="small on a CPU only")
def test_a_record(tmp_path, monkeypatch):
    """No large copy, no compiler, which CI has no time for."""
    monkeypatch.setattr(
        bench_deep,
        "ceilings",
        lambda: [
            {"what": "copy", "moved": 8, "seconds": 1.0},
            {"what": "matmul", "flops": 2, "seconds": 1.0},
        ],
    )
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    file = tmp_path / "record.json"
    main("bench", "deep", "--json", str(file))
    record = json.loads(file.read_text())
    assert record["command"] == "fastweights bench deep"
    rows = [row for row in record["rows"] if "pass" in row]
    names = ["ttt-linear", "lact", "mesa"]
    assert [row["what"] for row in rows] == [n for n in names for _ in "12"]
    for row in rows:
        assert row["seconds"] > 0 and row["flops"] > 0
        assert row["floor"] >= row["flops"] / 2
    for forward, both in zip(rows[::2], rows[1::2], strict=True):
        assert forward["pass"] == "forward" != both["pass"]
        assert 2 < both["flops"] / forward["flops"] <= 3
