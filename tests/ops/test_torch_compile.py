"""linear_recurrence inside torch.compile: one graph for every length."""

import pytest
import torch
import torch.nn.functional as F
from support.graphs import in_one_graph
from support.inputs import assert_same, member_inputs, results
from torch import nn

import fastweights as fw
from fastweights import ops


class Model(nn.Module):
    """Two layers of Kimi Delta Attention between embedding and logits."""

    def __init__(self, width=16, heads=2, vocabulary=7, backend="auto"):
        super().__init__()
        self.heads, self.backend = heads, backend
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.Linear(width, 4 * width + heads) for _ in range(2)
        )
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, tokens, cu_seqlens=None):
        x = self.embed(tokens)
        for layer in self.layers:
            y, beta = layer(x).tensor_split([-self.heads], dim=-1)
            q, k, v, g = y.unflatten(-1, (self.heads, -1)).chunk(4, dim=-1)
            o, _ = fw.kda(
                q,
                F.normalize(k, dim=-1),
                v,
                F.logsigmoid(g),
                beta.sigmoid(),
                cu_seqlens=cu_seqlens,
                backend=self.backend,
            )
            x = x + o.flatten(2)
        return self.logits(x)


def batches(packed):
    """Each token is 3 times the last, plus 1, mod 7; three lengths."""
    generator = torch.Generator().manual_seed(0)
    motif = torch.tensor([0, 1, 4, 6, 5, 2]).repeat(20)
    for step in range(50):
        T = (50, 70, 90)[step % 3]
        starts = torch.randint(6, (1 if packed else 2,), generator=generator)
        tokens = torch.stack([motif[i : i + T + 1] for i in starts])
        cu_seqlens = torch.tensor([0, 20 + step % 30, T]) if packed else None
        yield tokens[:, :-1], tokens[:, 1:], cu_seqlens


def train(model, run, packed, device):
    """The losses of ``run``, which is the model or calls it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for batch in batches(packed):
        tokens, targets, cu_seqlens = (
            None if x is None else x.to(device) for x in batch
        )
        torch._dynamo.mark_dynamic(tokens, 1)
        loss = F.cross_entropy(run(tokens, cu_seqlens).mT, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_compiled_model_trains_as_the_loop_does(device, packed):
    compiler, kernels = "aot_eager", "torch"
    if device == "cuda":
        compiler, kernels = "inductor", "triton"
    torch.manual_seed(0)
    loop = Model(backend="loop").to(device)
    model = Model().to(device)
    model.load_state_dict(loop.state_dict())
    ref = train(loop, loop, packed, device)
    with ops.record_backends() as ran, in_one_graph(model, compiler) as run:
        losses = train(model, run, packed, device)
    passes = f"{kernels} forward", f"{kernels} backward"
    assert ran == 50 * [x for x in passes for _ in range(2)]
    assert ref[-3:].mean() < ref[:3].mean() / 2
    torch.testing.assert_close(losses, ref, rtol=0, atol=1e-3)


def test_inductor_agrees():
    x = member_inputs("channel", "delta", T=40)
    compiled = torch.compile(fw.linear_recurrence, fullgraph=True)
    assert_same(results(compiled, x), results(fw.linear_recurrence, x), 1e-12)


@pytest.mark.gpu
def test_a_training_step_in_a_cuda_graph():
    """Fifty replays of one captured step, against fifty eager ones."""

    def begin():
        torch.manual_seed(0)
        model = Model().cuda()
        optimizer = torch.optim.Adam(
            model.parameters(), lr=0.02, capturable=True
        )

        def step(tokens, targets):
            loss = F.cross_entropy(model(tokens).mT, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        return step, model, optimizer

    data = [
        (tokens[:, :50].cuda(), targets[:, :50].cuda())
        for tokens, targets, _ in batches(packed=False)
    ]
    step, _, _ = begin()
    ref = [step(*batch).item() for batch in data]

    step, model, optimizer = begin()
    before = [p.detach().clone() for p in model.parameters()]
    static = [x.clone() for x in data[0]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ops.record_backends() as ran:
        loss = step(*static)
    assert ran == 2 * ["triton forward"] + 2 * ["triton backward"]
    with torch.no_grad():  # the warm-up changed them
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
        for state in optimizer.state.values():
            for x in state.values():
                x.zero_()
    losses = []
    for batch in data:
        for x, value in zip(static, batch, strict=True):
            x.copy_(value)
        graph.replay()
        losses.append(loss.item())
    assert sum(ref[-3:]) < sum(ref[:3]) / 2
    assert losses == pytest.approx(ref, abs=1e-3)
