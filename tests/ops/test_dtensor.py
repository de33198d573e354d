"""Heads on several devices: what linear_recurrence says of DTensors."""

import pytest
import torch
import torch.distributed as dist
from support.inputs import member_inputs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import local_map
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastweights as fw


@pytest.fixture
def mesh():
    """Two devices, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_heads_on_two_devices(mesh):
    """Each has its own: there is nothing to communicate."""
    assert "experimental.local_map" in fw.linear_recurrence.__doc__
    x = member_inputs("head", "delta", T=20, H=2, HV=4)
    x = [x[n].requires_grad_() for n in ("q", "k", "v", "g", "beta")]
    heads, states = [Shard(2)], [Shard(1)]
    sharded = local_map(
        fw.gated_deltanet,
        out_placements=(heads, states),
        in_placements=(heads,) * 5,
        device_mesh=mesh,
    )
    found = sharded(*(DTensor.from_local(t, mesh, heads) for t in x))
    assert [t.shape[n] for t, n in zip(found, (2, 1), strict=True)] == [8, 8]
    found = [t.to_local() for t in found]
    expected = fw.gated_deltanet(*x)
    losses = [o.sum() + state.sum() for o, state in (found, expected)]
    gradients = [torch.autograd.grad(loss, x) for loss in losses]
    for got, ref in (found, expected), gradients:
        for a, b in zip(got, ref, strict=True):
            assert a.equal(b)
