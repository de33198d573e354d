"""Two processes with half of a batch each, against one with all of it."""

import copy
import os
import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.model_cases import KINDS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from fastweights.models import (
    LanguageModel,
    ModelConfig,
    load,
    next_tokens,
)

CONFIG = ModelConfig(
    vocab_size=70,
    dim=32,
    num_layers=3,
    pattern=("gated_deltanet", "mamba", "softmax"),
    num_heads=2,
    mlp_multiple=32,
    tie_embeddings=True,
)


def replicated(model):
    return DistributedDataParallel(model)


def sharded(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_units(model):
    """Every module with parameters of its own is a unit."""
    mesh = init_device_mesh("cpu", (2,))
    for module in reversed([*model.modules()]):
        if [*module.parameters(recurse=False)]:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def one_process(rank, file, folder):
    """What each of the two does; an assertion that fails ends both."""
    torch.set_num_threads(1)
    os.environ["USE_LIBUV"] = "0"
    store = dist.FileStore(file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    for tied in (True, False):
        whole = LanguageModel(replace(CONFIG, tie_embeddings=tied))
        tokens = torch.randint(70, (2, 24))
        whole.loss(tokens).backward()
        for wrap in (replicated, sharded, in_units):
            for recompute in (False, True):
                check_gradients(whole, tokens, rank, wrap, recompute)
        model = in_units(copy.deepcopy(whole))
        losses = model.token_losses(tokens, tokens)
        want = whole.token_losses(tokens, tokens)
        torch.testing.assert_close(losses, want, rtol=1e-4, atol=1e-6)
        register_fsdp_forward_method(model, "generate")
        new, want = (m.generate(tokens[0], 5)[0] for m in (model, whole))
        assert new.equal(want)
        model.save(folder)
        dist.barrier()
        for name, x in load(folder).state_dict().items():
            assert x.equal(whole.state_dict()[name])
        dist.barrier()
    for kind in KINDS:
        of_one = replace(CONFIG, pattern=(kind,), num_layers=1)
        whole = LanguageModel(of_one, dtype=torch.float64)
        whole.loss(tokens).backward()
        check_gradients(whole, tokens, rank, in_units, False)
    dist.destroy_process_group()


def check_gradients(whole, tokens, rank, wrap, recompute):
    """The gradients of half a batch, averaged, with those of all of it."""
    expected = dict(whole.named_parameters())
    mine = tokens[rank : rank + 1]
    model = copy.deepcopy(whole)
    model.zero_grad()
    model.recompute = recompute
    run = wrap(model)
    if wrap is replicated:
        loss = run(mine, targets=next_tokens(mine))
    else:
        loss = model.loss(mine)
    loss.backward()
    for name, p in model.named_parameters():
        g = p.grad if wrap is replicated else p.grad.full_tensor()
        torch.testing.assert_close(
            g, expected[name].grad, rtol=1e-4, atol=1e-6
        )


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="no gloo"
)
def test_two_processes_have_the_gradients_of_one():
    """Replicated (DDP) and sharded (FSDP2), blocks kept or computed again."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(one_process, (store, folder), nprocs=2)
