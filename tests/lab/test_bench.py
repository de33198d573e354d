"""The timing tool: what it measures, and what a record holds."""

import importlib.metadata
import json
import math
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fastweights as fw
from fastweights.layers import Decay
from fastweights.torch_backend import recurrence as torch_recurrence
from fastweights_lab import records
from fastweights_lab.bench import nvidia_kda, speed, timing
from fastweights_lab.commands import bench
from fastweights_lab.program import main


def test_timeit_is_the_median(monkeypatch):
    """After the calls that warm up, which nobody times."""
    calls, clock = [], iter([0, 1, 10, 19, 20, 22])
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        seconds = timing.timeit(
            lambda: calls.append(1), device="cpu", repeats=3, warmup=2
        )
    assert seconds == 2 and len(calls) == 5


def test_record(monkeypatch, tmp_path, capsys):
    """A case's rows, with the machine and the command; printed and saved."""
    row = {"form": "softmax", "T": 256, "seconds": 1e-3}
    fast = row | {"moved": 2 * 10**9, "flops": 3 * 10**9}
    rows = (lambda: iter([row, fast])), None
    monkeypatch.setitem(bench.CASES, "decode", rows)
    path = tmp_path / "record.json"
    main("bench", "decode", "--json", str(path))
    record = json.loads(path.read_text())
    assert record["command"] == "fastweights bench decode"
    assert record["torch"] == torch.__version__
    assert record["rows"] == [row, fast]
    printed = capsys.readouterr().out
    assert "form=softmax  T=256  1.000 ms\n" in printed
    assert "1.000 ms  2.000 TB/s  3.0 TFLOP/s" in printed


@pytest.mark.parametrize(
    "words", ["nothing", "deep tttt", "decode --peer fla"]
)
def test_unknown_case(words, capsys):
    with pytest.raises(SystemExit):
        main("bench", *words.split())
    assert words.split()[-1] in capsys.readouterr().err


RECORDS = ("ceilings", "crossover", "chunks", "decode")


@pytest.mark.parametrize("case", RECORDS)
def test_recorded_run(case):
    record = records.load(f"h200_{case}")
    assert record["command"].endswith(case)
    assert record["device"] == "NVIDIA H200" and record["commit"]
    assert all(row["seconds"] > 0 for row in record["rows"])


def test_members_on_this_machine(tmp_path, monkeypatch, capsys):
    """Every column of a small run; the floor from its own ceilings."""
    path = tmp_path / "record.json"
    command = "members --members gated_deltanet linear_attention"
    command += " --shapes train decode"
    arguments = [*command.split(), "--no-first", "--json", str(path)]
    monkeypatch.setattr(speed, "ON_CPU", speed.Shape(1, 64, 1, 1, 16, 16))
    main("bench", *arguments)
    record = json.loads(path.read_text())
    assert record["command"] == f"fastweights bench {command} --no-first"
    copy, matmul, *rows = record["rows"]
    steps = [rows.pop(9), rows.pop(0)]
    assert all(row["shape"] == "decode" for row in steps)
    assert steps[1]["floor"] == pytest.approx(
        steps[1]["moved"] * copy["seconds"] / copy["moved"]
    )
    # Gated DeltaNet with each gate, linear attention once, two passes each
    assert [(r["member"], r["gate"], r["what"]) for r in rows] == [
        (member, gate, what)
        for member, gate in (
            ("gated_deltanet", "mild"),
            ("gated_deltanet", "kept"),
            ("gated_deltanet", "strong"),
            ("gated_deltanet", "model"),
            ("linear_attention", "mild"),
        )
        for what in ("forward", "forward+backward")
    ]
    floor = max(
        rows[0]["moved"] * copy["seconds"] / copy["moved"],
        rows[0]["flops"] * matmul["seconds"] / matmul["flops"],
    )
    assert rows[0]["floor"] == pytest.approx(floor)
    assert rows[1]["floor"] == pytest.approx(3 * floor)
    assert "x floor" in capsys.readouterr().out


@pytest.mark.parametrize("member", speed.MEMBERS)
def test_inputs_suit_their_member(member, monkeypatch):
    x = speed.inputs(member, speed.Shape(1, 20, 1, 2, 8, 4), "kept")
    o, _ = speed.operator(member)(**x)
    assert o.shape == (1, 20, 2, 4)
    gate = x.get("w" if member == "rwkv7" else "g")
    assert gate is None or (gate == -1e-3).all()


@pytest.mark.parametrize("member", speed.MEMBERS)
def test_gates_as_models_start(member):
    """As those of the library's layer, by their quantiles."""
    if speed.MEMBERS[member][0] is None:
        return
    shape = speed.Shape(1, 512, 1, 8, 16, 4)
    name = "w" if member == "rwkv7" else "g"
    mild, g = (speed.inputs(member, shape, x)[name] for x in ("mild", "model"))
    assert g.shape == mild.shape and g.max() < 0
    if member == "retention":
        assert torch.equal(g, fw.retnet_log_decay(8))
    elif member == "gla":
        assert torch.equal(g, mild)
    else:
        n = 16 if speed.MEMBERS[member][0] == "channel" else 1
        layer = Decay(4096, n)
        theirs = layer(torch.randn(1, 64, 4096 * n))
        ours = speed.inputs(
            member, speed.Shape(1, 64, 1, 4096, n, 1), "model"
        )[name]
        at = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99])
        want, got = (
            (-x.detach().flatten()).log10().quantile(at)
            for x in (theirs, ours)
        )
        assert (want - got).abs().max() < 0.1


def test_packed_calls_have_gradients():
    shape = speed.Shape(1, 40, 1, 2, 8, 4, (30, 10), 2.0)
    x = speed.inputs("kda", shape, "model")
    assert x["cu_seqlens"].tolist() == [0, 30, 40]
    assert 1 < x["beta"].max() <= 2
    grads = speed.passes(fw.kda, x)["forward+backward"]()
    assert [t.shape for t in grads] == [
        t.shape for name, t in x.items() if name != "cu_seqlens"
    ]


@pytest.mark.parametrize(
    "member", [m for m in speed.MEMBERS if m not in speed.ERASE]
)
def test_decoding_moves_each_state_there_and_back(member):
    """In one round every state takes one step, as decode_step would."""
    shape = speed.Shape(2, 1, 1, 2, 16, 8)
    step, moved = speed.decode_round(member, shape)
    assert moved > 2 * 4 * 2 * 2 * 16 * 8
    states = [c.cell_contents for c in step.__closure__]
    states = next(x for x in states if isinstance(x, list))
    assert len(states) == speed.STATES
    step()
    assert all(torch.equal(S, states[0]) for S in states)
    assert states[0].any()


@pytest.mark.gpu
@pytest.mark.skipif(not timing.ON_GPU, reason="needs a GPU")
def test_a_replayed_round_keeps_its_states():
    before = torch.cuda.memory_allocated()
    step, moved = speed.decode_round("gla", speed.DECODED)
    kept = torch.cuda.memory_allocated() - before
    assert kept > 0.4 * speed.STATES * moved  # moved there and back
    torch.cuda.empty_cache()
    step()
    torch.cuda.synchronize()


def test_work_is_what_a_forward_must_do():
    """Bytes and FLOPs per token and head, K = V = 128, bf16, on paper."""
    one = speed.Shape(1, 1, 1, 1, 128, 128)
    size = torch.finfo(timing.DTYPE).bits // 8
    moved, flops = speed.work("gated_deltanet", one)
    assert moved == 4 * 128 * size + 8
    assert flops == 2 * 64 * 256 + 4 * 128**2 + (
        2 * 64 * 256 + 2 * 128**2 + 64**2 // 3
    )
    assert speed.work("kda", one)[0] == 4 * 128 * size + 4 * 128 + 4
    assert speed.work("linear_attention", one)[1] == 32768 + 65536


def test_first_call_is_timed_in_a_process_of_its_own():
    assert 0 < speed.first_seconds("linear_attention") < 60


@pytest.mark.parametrize(
    "peer, package",
    [("fla", "fla-core"), ("flash_qla", "flash-qla"), ("attn_gym",) * 2],
)
def test_a_peer_that_is_not_there_is_named(peer, package, monkeypatch):
    monkeypatch.setitem(sys.modules, peer, None)
    with pytest.raises(SystemExit, match=f"--peer {peer} .* {package}"):
        speed.peer_functions(peer)


def bench_lines(arguments, monkeypatch, capsys):
    """What the bench prints of whom, with one small shape for all."""
    small = speed.Shape(1, 64, 1, 1, 128, 128)
    monkeypatch.setattr(speed, "ON_CPU", small)
    main("bench", *f"members --no-first --shapes train {arguments}".split())
    return [x for x in capsys.readouterr().out.splitlines() if "who=" in x]


def test_attention_gym_is_timed_where_its_bound_on_g_holds(
    monkeypatch, capsys
):
    """It calls g gate, and its KDA needs g >= -5.914."""
    least = []

    def chunk_kda(*, gate, output_final_state, cu_seqlens, **x):
        assert output_final_state and cu_seqlens is None
        least.append(gate.min().item())
        return fw.kda(g=gate, **x)

    peer = types.ModuleType("attn_gym.linear")
    peer.chunk_gdn, peer.chunk_kda = None, chunk_kda
    monkeypatch.setitem(sys.modules, "attn_gym", types.ModuleType("attn_gym"))
    monkeypatch.setitem(sys.modules, "attn_gym.linear", peer)
    arguments = "--members kda --gates mild kept strong model --peer attn_gym"
    lines = bench_lines(arguments, monkeypatch, capsys)
    gates = [x.split("gate=")[1].split()[0] for x in lines if "attn" in x]
    assert gates == ["mild", "mild", "kept", "kept"]
    assert min(least) > -0.5


@pytest.mark.parametrize("gate", speed.GATES)
def test_flas_safe_gate_is_used_where_the_gates_allow_it(gate):
    rivals = {"fla": {"kda": dict, "gated_deltanet": dict}}
    shape = speed.SHAPES["train"]
    kda = speed.peers_for(rivals, "kda", shape, gate)["fla"]()
    assert kda == ({"safe_gate": True} if gate in ("mild", "kept") else {})
    plain = speed.peers_for(rivals, "gated_deltanet", shape, gate)
    assert plain == {"fla": dict}
    assert not speed.peers_for(rivals, "gla", shape, gate)


@pytest.mark.parametrize("gate, middle", [("bounded", -2.5), ("late", -0.033)])
def test_gates_with_a_lower_bound(gate, middle):
    g = speed.inputs("kda", speed.Shape(1, 512, 2, 2, 64, 64), gate)["g"]
    assert g.min() > -5 and g.max() < 0
    assert abs(g.median().item() - middle) < 0.05 * -middle


def test_batch_invariance_is_timed_as_a_peer(monkeypatch, capsys):
    """Its backward too is one of such a call."""
    seen, forward = [], torch_recurrence.forward

    def noted(*arguments):
        seen.append(arguments[-1].batch_invariant)
        return forward(*arguments)

    monkeypatch.setattr(torch_recurrence, "forward", noted)
    arguments = "--members kda --gates bounded --peer batch_invariant"
    lines = bench_lines(arguments, monkeypatch, capsys)
    theirs = ["who=batch_invariant" in line for line in lines]
    assert theirs == [False, False, True, True]
    half = len(seen) // 2
    assert seen == half * [False] + half * [True]


def test_nvidia_is_left_out_where_its_files_are_not(tmp_path, capsys):
    (tmp_path / nvidia_kda.FILES[0]).touch()
    assert speed.peer_functions("nvidia", tmp_path) == {}
    said = f"nvidia is left out: {tmp_path} has no {nvidia_kda.FILES[1]}"
    assert said in capsys.readouterr().err
    assert speed.peer_functions("nvidia") == {}
    assert "need --peer-path" in capsys.readouterr().err


# What nvidia-cudnn-frontend's own launches have: blocks of a grid, threads,
# arguments.
LAUNCHES = {
    2: {
        "kda_fused": ((3, 2 * 4), 128, 17),
        "k_meta": ((1, 1), 32, 7),
        "k_prep<false>": ((3, 3), 512, 18),
        "k_scan_t<32, 256, false, false>": ((8, 2 * 3), 256, 20),
        "k_bwd<false>": ((3, 3), 512, 21),
    },
    1: {
        "kda_fused": ((3, 8), 128, 17),
        "k_prep<true>": ((2, 3), 512, 18),
        "k_scan_t<32, 256, true, true>": ((8, 3), 256, 20),
        "k_bwd<true>": ((2, 3), 512, 21),
    },
}


@pytest.mark.parametrize("B", LAUNCHES)
def test_launches_of_nvidias_kernels(B):
    """Two sequences of 64 tokens, or one of 128."""
    found = {}

    def launch(name, grid, threads, *given):
        found[name] = grid, threads, len(given)
        for x in given:
            nvidia_kda.as_argument(x)
            assert not isinstance(x, torch.Tensor) or x.is_contiguous()

    x = speed.inputs("kda", speed.Shape(B, 128 // B, 3, 3, 128, 128), "mild")
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    o, state = nvidia_kda.kda(launch, **leaves)
    assert o.shape == x["v"].shape and state.shape == (B, 3, 128, 128)
    grads = torch.autograd.grad(o, [*leaves.values()], torch.ones_like(o))
    assert [dx.shape for dx in grads] == [t.shape for t in x.values()]
    assert found == LAUNCHES[B]
    assert found.keys() < {
        n for file in nvidia_kda.KERNELS.values() for n in file
    }


README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


ROW = {"what": "copy", "seconds": 1.0}


@pytest.mark.parametrize("case", ["members", "trained"])
def test_a_record_names_its_peers(case, monkeypatch, tmp_path, capsys):
    """Their versions, and how they were set; of folders their last name."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    rows = (lambda **_: iter([ROW])), None
    monkeypatch.setitem(bench.CASES, case, rows)
    path = tmp_path / "record.json"
    words = f"{case} --peer fla --peer-path {tmp_path} --json {path}"
    main("bench", *words.split())
    record = json.loads(path.read_text())
    assert record["command"].endswith(f"--peer-path {tmp_path.name}")
    peers = record["peers"]
    assert peers.keys() == {"fla"}
    assert peers["fla"]["package"] == "fla-core"
    assert peers["fla"]["version"] == "1.2.3"
    assert "lifts its guard" in peers["fla"]["setting"]


RECORD = records.load("h200_members")


def times(record):
    """Seconds, by member, shape, gate, pass and who."""
    names = ("member", "shape", "gate", "what", "who")
    return {
        tuple(row[name] for name in names): row["seconds"]
        for row in record["rows"]
        if "gate" in row
    }


OWN = "fastweights"
TIMES, BESIDE, EARLIER = (
    times(record)
    for record in (
        RECORD,
        records.load("h200_peers"),
        records.load("h200_flash_qla"),
    )
)


def of_a_peers(times, peer):
    """Our time over the peer's, by member, shape, gate and pass."""
    return {
        tuple(call): times[*call, "fastweights"] / time
        for (*call, who), time in times.items()
        if who == peer
    }


def test_what_the_readme_says_of_peers():
    ratios = [1 / x for x in of_a_peers(TIMES, "fla").values()]
    assert len(ratios) == 72
    words = f"take {min(ratios):.1f} to {max(ratios):.1f} times as long"
    assert words in README
    ratios = [1 / x for x in of_a_peers(BESIDE, "attn_gym").values()]
    words = f"{min(ratios):.1f} to {max(ratios):.1f} times. Two peers"
    assert words in README
    both = "forward+backward"
    ratios = [
        100 * (1 - EARLIER[*call, both, "flash_qla"] / TIMES[*call, both, OWN])
        for call in (
            ("gated_deltanet", "train", "mild"),
            ("gated_deltanet", "long", "mild"),
            ("gated_deltanet", "long", "kept"),
        )
    ]
    assert f"by {min(ratios):.0f} to {max(ratios):.0f} %" in README


def test_the_versions_of_the_peers_in_the_readme():
    for record, peer, name in (
        ("h200_members", "fla", "flash-linear-attention"),
        ("h200_flash_qla", "flash_qla", "FlashQLA"),
        ("h200_peers", "attn_gym", "Attention Gym"),
    ):
        found = records.load(record)
        assert f"{name} {found['peers'][peer]['version']}" in README
        assert (found["torch"], found["triton"]) == ("2.11.0+cu130", "3.6.0")


def test_how_long_the_readme_says_that_a_first_gradient_takes():
    first = [
        row["seconds"] for row in RECORD["rows"] if row["what"] == "first"
    ]
    assert len(first) == len(speed.MEMBERS) - len(speed.ERASE)
    assert 5.5 < min(first) < 6.5 and 9.5 < max(first) < 10.5
    assert "after six to ten seconds of compiling" in README


def test_what_the_readme_calls_mild():
    torch.manual_seed(0)
    typical = F.logsigmoid(torch.randn(10**6)).mean().item() / 16
    assert f"half in some {math.log(0.5) / typical:.0f} tokens" in README
