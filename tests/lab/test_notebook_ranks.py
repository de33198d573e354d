"""Ranks of a notebook: what they run, and how they end."""

import os
import types

import pytest
import torch
import torch.distributed as dist

from fastweights_lab.notebook import ranks as module

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no gloo", allow_module_level=True)

NOTEBOOK = """
import os
import torch
import torch.distributed as dist

factor = 3

def total(x, then=1, *, less=0):
    y = scaled(x) - less
    dist.all_reduce(y)
    return y + then, dist.get_rank()

def scaled(x):
    return (lambda y: factor * y)(x)

def inner(n):
    return lambda: n

def counted(n):
    return 1 + counted(n - 1) if n else 0

def one_raises(x):
    if dist.get_rank() == 1:
        raise ValueError("x: got nothing")
    dist.barrier()

def one_ends(x):
    if dist.get_rank() == 1:
        os._exit(3)

def one_waits(x):
    if dist.get_rank() == 1:
        dist.barrier()
"""


@pytest.fixture(scope="module")
def notebook():
    """The names of a notebook whose cells have run."""
    names = types.SimpleNamespace()
    names.__dict__["__name__"] = "__main__"
    exec(NOTEBOOK, names.__dict__)
    return names


@pytest.fixture(scope="module")
def ranks():
    made = module.Ranks(2)
    yield made
    made.stop()


def test_a_function_travels_with_what_it_names(ranks, notebook):
    found = ranks.run(notebook.total, [torch.ones(2), torch.zeros(2)])
    assert [rank for _, rank in found] == [0, 1]
    assert all(x.tolist() == [4, 4] for x, _ in found)
    assert ranks.run(notebook.counted, [2, 5]) == [2, 5]
    with pytest.raises(TypeError, match="<lambda>: got a function with var"):
        ranks.run(notebook.inner(3))
    assert ranks.run(os.path.join, "ab", "cd") == ["a/c", "b/d"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one_raises", "rank 1: ValueError: x: got nothing"),
        ("one_ends", "rank 1: it ended"),
        ("one_waits", "rank 1: it waits for others"),
    ],
)
def test_a_rank_that_fails_ends_the_others(
    ranks, notebook, monkeypatch, name, said
):
    ranks.run(notebook.counted, [0, 0])  # they are there
    monkeypatch.setattr(module, "SECONDS", 2)
    before = ranks.processes
    with pytest.raises(RuntimeError, match=f"^{said}$"):
        ranks.run(getattr(notebook, name), [0, 0])
    assert all(process.poll() is not None for process in before)
    monkeypatch.undo()  # and new ones come
    assert ranks.run(notebook.counted, [1, 2]) == [1, 2]


def test_they_end_with_the_notebook(ranks, notebook):
    ranks.run(notebook.counted, [0, 0])
    for pipe in ranks.pipes:
        pipe.close()
    assert [process.wait(20) for process in ranks.processes] == [0, 0]
