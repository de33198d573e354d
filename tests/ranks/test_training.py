"""Runs whose processes share sequences, parameters, or both."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from support import rank_cases
from support.process_group import ProcessGroup

from fastweights_lab.text.training import Settings, Training

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text of sums."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        lines = [f"{i} and {j} are {i + j}\n" for j in range(3 + i)]
        (folder / f"{i:02}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def group():
    """Four processes."""
    made = ProcessGroup(4)
    yield made
    made.stop()


LAYOUTS = {
    "windows": (
        {"context_parallel": 4},
        {"context_parallel": 2, "accumulate": 2},
        {"fsdp": True},
        {"fsdp": True, "context_parallel": 2, "recompute": True},
    ),
    # Parts of a step cut documents: as many parts as one process has.
    "packs": (
        {"context_parallel": 4},
        {"fsdp": True, "context_parallel": 4},
    ),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_steps_of_one_process(folder, group, tmp_path, kind):
    """At each layout, which goes on from the one before; then by one."""
    settings = Settings(
        corpus=(folder,),
        pattern=("gated_deltanet", "softmax"),
        dim=16,
        num_heads=2,
        length=16,
        tokens=128,
        steps=20,
        warmup=4,
        eval_windows=4,
        device="cpu",
        packed=kind == "packs",
    )
    alone = Training(settings)
    want = [alone.step().item() for _ in range(20)]
    path, losses, layouts = None, [], LAYOUTS[kind]
    for n, layout in enumerate(layouts, 1):
        here = replace(settings, **layout)
        save = tmp_path / f"{n}.pt"
        given = here, path, save, 20 * n // len(layouts)
        results = group.run(rank_cases.train, *given)
        assert all(result == results[0] for result in results)
        path = save
        losses += results[0][0]
    assert losses == pytest.approx(want, abs=1e-4)
    found = alone.evaluate()["bits per byte"]
    assert results[0][1] == pytest.approx(found, abs=1e-4)
    after = Training(settings, path)
    assert after.steps_done == 20
    for x, y in zip(
        after.model.parameters(), alone.model.parameters(), strict=True
    ):
        assert (x - y).abs().max() < 1e-3


def test_processes_have_equal_shares():
    for packed, said in ((False, "16 tokens of a window"), (True, "64 t")):
        settings = Settings(
            length=16, tokens=128, context_parallel=3, packed=packed
        )
        with pytest.raises(ValueError, match=f"got 3, need a div.*the {said}"):
            settings.check_parts(2)


BREAKS = """
import os, sys
from fastweights_lab.text.training import Training

if os.environ["RANK"] == "1":
    def step(self):
        raise RuntimeError("rank 1 has had enough")
    Training.step = step

from fastweights_lab.program import main
sys.exit(main("train", *sys.argv[1:]))
"""


def test_a_process_that_raises_ends_the_others(folder, tmp_path):
    """Under torchrun, while the others wait for its map."""
    program = tmp_path / "breaks.py"
    program.write_text(BREAKS)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", "2", str(program)]
    command += ["--corpus", str(folder), "--out", str(tmp_path / "run")]
    command += ["--dim", "16", "--num-heads", "2", "--device", "cpu"]
    start = time.monotonic()
    run = subprocess.run(
        [*command, "--context-parallel", "2"],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "USE_LIBUV": "0",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert run.returncode and "rank 1 has had enough" in run.stderr
    assert time.monotonic() - start < 60  # of which 30 to begin, if busy
