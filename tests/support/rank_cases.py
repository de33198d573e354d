"""What each rank of a group does in the tests of context_parallel.

The whole of a case is drawn on every rank, from one seed, and computed there
without the context; then the rank's own tokens are, in it.
"""

import copy
import functools
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch._dynamo  # here, not once in each of the processes
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fastweights as fw
from fastweights.models import next_tokens
from fastweights.ops.common.backends import record_backends
from fastweights.ops.convolution import convolve_heads, short_convolution
from fastweights.ranks import prefix
from fastweights.ranks.group import current_ranks
from fastweights_lab.text.training import Training
from support.model_cases import KINDS, make_model, token_ids

FP64 = torch.float64
BUDGETS = {
    torch.int64: 0,
    FP64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
}
H, HV, K, V = 2, 4, 5, 3


class Spread(NamedTuple):
    """How tokens are spread over ranks, and where a pack's sequences lie."""

    tokens: tuple[int, ...]
    cu_seqlens: tuple[int, ...] | None
    told: bool = True

    @property
    def N(self):
        return 2 if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def shape(self):
        return 1 if self.cu_seqlens else 2, sum(self.tokens)

    @property
    def offsets(self):
        found = self.cu_seqlens
        return found and torch.tensor(found, dtype=torch.int32)

    def own(self, x, rank):
        start = sum(self.tokens[:rank])
        return x[:, start : start + self.tokens[rank]]

    def context(self, **options):
        tokens = self.tokens if self.told else None
        return fw.context_parallel(dist.group.WORLD, tokens, **options)


def spreads(size):
    """By name: equal, unequal and empty ranks; borders in and at packs'."""
    some = (3, 9, 0, 5)[:size]
    late = (0, 9) if size == 2 else (0, 0, 9, 2)[:size]
    T, S = 7 * size, sum(some)
    return {
        "equal": Spread((7,) * size, None, False),
        "unequal": Spread(some, None),
        "a pack": Spread((7,) * size, (0, 3, 3, 7, 11, T - 2, T), False),
        "one sequence": Spread((7,) * size, (0, T - 3), False),
        "an unequal pack": Spread(some, (0, 0, 2, S - 1, S - 1, S)),
        "two sequences": Spread(some, (0, S - 2, S)),
        "an empty first": Spread(late, (0, 0, 3, sum(late))),
    }


def normal(*shape):
    return torch.randn(shape, dtype=FP64)


def leaves(tensors):
    return {n: x.clone().requires_grad_() for n, x in tensors.items()}


def check_against_whole(rank, call, spread, tokens, shared):
    """call(**tensors, cu_seqlens) -> results, the first of them per token.

    Values and gradients of all ``tokens`` [B, T, ..] and of what is
    ``shared``, whose gradients are sums over ranks. The other results are on
    all ranks, and each differentiates its part of them.
    """
    cu = spread.offsets
    whole = leaves(tokens | shared)
    want = call(**whole, cu_seqlens=cu)
    weights = [torch.randn_like(x) for x in want]
    sum((w * x).sum() for w, x in zip(weights, want, strict=True)).backward()
    own = {n: spread.own(x, rank) for n, x in tokens.items()}
    own = leaves(own | shared)
    with spread.context():
        first, *others = call(**own, cu_seqlens=cu)
        loss = (spread.own(weights[0], rank) * first).sum()
        for w, x in zip(weights[1:], others, strict=True):
            loss = loss + (w * x).sum() / len(spread.tokens)
        loss.backward()
    assert_close(first, spread.own(want[0], rank), "o")
    for n, (x, y) in enumerate(zip(others, want[1:], strict=True)):
        assert_close(x, y, f"result {n + 1}")
    for name, x in own.items():
        expected = whole[name].grad
        # None, of a rank without tokens
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        if name in shared:
            dist.all_reduce(grad)
        else:
            expected = spread.own(expected, rank)
        assert_close(grad, expected, f"d{name}")


def assert_close(found, want, name):
    """As near as its dtype is to the largest number, or to 1."""
    finite = want.masked_fill(want.isinf(), 0)
    size = finite.abs().max().item() if want.numel() else 0
    torch.testing.assert_close(
        *(found, want),
        rtol=0,
        atol=BUDGETS[want.dtype] * max(1, size),
        msg=lambda said: f"{name}: {said}",
    )


def inputs(name, spread):
    """A member's inputs: those of tokens, and those of all."""
    torch.manual_seed(0)
    B, T = spread.shape
    tokens = {
        "q": normal(B, T, H, K),
        "k": F.normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
    }
    shared = {"initial_state": normal(spread.N, HV, K, V)}
    if name in ("mamba2", "gated_deltanet", "comba"):
        tokens["g"] = -torch.rand(B, T, HV, dtype=FP64)
    if name in ("gla", "kda", "gated_deltanet2"):
        tokens["g"] = -torch.rand(B, T, HV, K, dtype=FP64)
    if name == "retention":
        shared["g"] = -torch.rand(HV, dtype=FP64)
    if name in ("deltanet", "gated_deltanet", "kda", "comba"):
        tokens["beta"] = torch.rand(B, T, HV, dtype=FP64)
    if name == "gated_retention":
        tokens["logits"] = normal(B, T, HV)
    if name == "gated_deltanet2":
        tokens["b"] = torch.rand(B, T, HV, K, dtype=FP64)
        tokens["w"] = torch.rand(B, T, HV, V, dtype=FP64)
    if name == "comba":
        tokens["p"] = 0.7 * tokens["k"] + 0.1 * normal(B, T, H, K)
    return tokens, shared


def check_member(rank, name, spread, backend="auto"):
    def call(**tensors):
        return getattr(fw, name)(**tensors, backend=backend)

    check_against_whole(rank, call, spread, *inputs(name, spread))


def check_by_doubling(rank, case, *arguments):
    """A case whose maps come by doubling."""
    with mock.patch.object(prefix, "MAX_GATHERED", 1):
        case(rank, *arguments)


def check_in_dtype(rank, name, spread, dtype):
    """Tokens in another dtype, states in fp32."""
    tokens, shared = inputs(name, spread)
    tokens = {n: x.to(dtype) for n, x in tokens.items()}
    shared = {n: x.float() for n, x in shared.items()}
    check_against_whole(rank, getattr(fw, name), spread, tokens, shared)


def check_compiled(rank, name, spread):
    """In one graph, forward and backward."""
    eager = getattr(fw, name)
    graph = torch.compile(eager, fullgraph=True, backend="aot_eager")

    def call(**tensors):
        whole = current_ranks() is None
        return (eager if whole else graph)(**tensors)

    check_against_whole(rank, call, spread, *inputs(name, spread))


def check_checkpointed(rank, name, spread):
    """Under activation checkpointing."""

    def call(**tensors):
        member = getattr(fw, name)
        return checkpoint(member, **tensors, use_reentrant=False)

    check_against_whole(rank, call, spread, *inputs(name, spread))


def check_own_states(rank, name, spread):
    """Not shared: of a pack those of the sequences that end here."""
    tokens, shared = inputs(name, spread)
    offsets = {"cu_seqlens": spread.offsets}
    _, want = getattr(fw, name)(**tokens, **shared, **offsets)
    own = {n: spread.own(x, rank) for n, x in tokens.items()}
    with spread.context(share_final_states=False):
        _, state = getattr(fw, name)(**own, **shared, **offsets)
    start = sum(spread.tokens[:rank])
    end = start + spread.tokens[rank]
    for n, (a, b) in enumerate(pairwise(spread.cu_seqlens)):
        if a < b:
            here = start < b <= end
            assert_close(
                state[n], want[n] if here else 0 * want[n], f"state {n}"
            )
    dist.all_reduce(state)
    assert_close(state, want, "their sum")


def check_normalised(rank, spread):
    tokens, _ = inputs("linear_attention", spread)
    shared = {"initial_state": normal(spread.N, HV, K, V + 1).abs()}

    def call(**tensors):
        return fw.linear_attention(
            **tensors, feature_map=lambda x: F.elu(x) + 1, normalize=True
        )

    check_against_whole(rank, call, spread, tokens, shared)


def check_mlstm(rank, spread, empty):
    """With gates that grow and shrink, and -inf among them."""
    tokens, _ = inputs("mamba2", spread)
    B, T = spread.shape
    tokens["g"], i = 2 * normal(B, T, HV), 3 * normal(B, T, HV)
    m = normal(spread.N, HV)
    tokens["g"][:, 2::5, 0] = -torch.inf
    i[:, 1::3, 1] = -torch.inf
    i[:, :, 2] = -torch.inf
    m[::2, 1:3] = -torch.inf
    S = normal(spread.N, HV, K, V + 1)
    S = S.masked_fill(m.isneginf()[..., None, None], 0)
    memories = []

    def call(S=None, **tensors):
        first = None if S is None else (S, m)
        own = i if current_ranks() is None else spread.own(i, rank)
        o, (S, after) = fw.mlstm(**tensors, i=own, initial_state=first)
        memories.append(after)
        return o, S

    check_against_whole(rank, call, spread, tokens, {} if empty else {"S": S})
    assert_close(memories[1], memories[0], "m")


def check_selective(rank, spread, softplus):
    torch.manual_seed(0)
    (B, T), D, N = spread.shape, 4, 3
    tokens = {
        "x": normal(B, T, D),
        "dt": torch.rand(B, T, D, dtype=FP64),
        "B": normal(B, T, 2, N),
        "C": normal(B, T, 2, N),
        "z": normal(B, T, D),
    }
    shared = {
        "A": -torch.rand(D, N, dtype=FP64),
        "D": normal(D),
        "initial_state": normal(spread.N, D, N),
    }
    if softplus:
        shared["dt_bias"] = normal(D)

    def call(**tensors):
        return fw.selective_scan(**tensors, dt_softplus=softplus)

    check_against_whole(rank, call, spread, tokens, shared)


def check_convolution(rank, spread, W, state):
    torch.manual_seed(0)
    (B, T), C = spread.shape, 2 * H * K + HV * V
    shared = {"weight": normal(C, W), "bias": normal(C)}
    if state:
        shared["initial_state"] = normal(spread.N, W - 1, C)
    tokens = {"x": normal(B, T, C)}
    check_against_whole(rank, short_convolution, spread, tokens, shared)

    def heads(**tensors):
        *qkv, state = convolve_heads(**tensors, heads=(H, HV), sizes=(K, V))
        return torch.cat([x.flatten(2) for x in qkv], -1), state

    check_against_whole(rank, heads, spread, tokens, shared)


SPREAD_MODELS = {
    "equal": Spread((6, 6), None, False),
    "unequal": Spread((2, 11), None),
    "a pack": Spread((9, 9), (0, 1, 1, 7, 14, 16), False),
    "an unequal pack": Spread((1, 12), (0, 9, 13)),
}
REFUSE = {
    "lact": "lact",
    "mesanet": "mesa",
    "titans": "titans",
    "ttt_linear": "ttt",
    "ttt_mlp": "ttt",
}


def check_layers(rank, spread):
    """A model of every layer: losses, and the gradients' mean over ranks."""
    kinds = tuple(kind for kind in KINDS if kind not in REFUSE)
    whole = make_model(kinds).double()
    checkpointed = copy.deepcopy(whole)
    checkpointed.recompute = True
    tokens, cu = token_ids(*spread.shape), spread.offsets
    want = whole.loss(tokens, cu_seqlens=cu)
    want.backward()
    logits, _ = whole(tokens, cu_seqlens=cu)
    targets = next_tokens(tokens, cu)
    for own in (copy.deepcopy(whole), checkpointed):
        own.zero_grad()
        with spread.context():
            mine = spread.own(tokens, rank)
            assert_close(
                *(next_tokens(mine, cu), spread.own(targets, rank)), "next"
            )
            loss = own.loss(mine, cu_seqlens=cu)
            loss.backward()
            found, _ = own(mine, cu_seqlens=cu)
        assert_close(found, spread.own(logits, rank), "logits")
        dist.all_reduce(loss.detach())
        assert_close(loss / 2, want, "loss")
        for (name, p), q in zip(
            own.named_parameters(), whole.parameters(), strict=True
        ):
            dist.all_reduce(p.grad)
            assert_close(p.grad / 2, q.grad, name)


@torch.no_grad()
def check_states(rank, spread, room):
    """Two calls with states: they are all there on both ranks."""
    kinds = tuple(kind for kind in KINDS if kind not in REFUSE)
    whole = make_model(kinds).double()
    whole.requires_grad_(False)
    tokens, cu = token_ids(*spread.shape), spread.offsets
    want = own = None
    if room:
        want, own = (whole.preallocate_states(spread.N, 40) for _ in range(2))
    for _ in range(2):
        logits, want = whole(tokens, want, cu)
        with spread.context():
            found, own = whole(spread.own(tokens, rank), own, cu)
        assert_close(found, spread.own(logits, rank), "logits")
        for kind, state, expected in zip(kinds, own, want, strict=True):
            for name, x in expected.tensors().items():
                assert_close(state.batch_field(name), x, f"{kind}: {name}")


def check_refused_layers(rank):
    """By name."""
    x = torch.randn(1, 8, 32)
    with fw.context_parallel(dist.group.WORLD):
        for kind, name in REFUSE.items():
            layer = make_model((kind, kind)).blocks[0].layer
            said = f"^{name}: got a call under context_parallel"
            with pytest.raises(NotImplementedError, match=said):
                layer(x)
        whole = make_model(("gla", "gla"))
        with pytest.raises(NotImplementedError, match=r"^generate: got a"):
            whole.generate(token_ids(5), 3)
        with torch.no_grad():
            _, state = whole.blocks[0].layer(x)
            state.num_accepted = torch.ones(1, dtype=torch.int64)
            with pytest.raises(ValueError, match="state: got one of decoding"):
                whole.blocks[0].layer(x, state)


def check_refusals(rank):
    """What is said of what does not fit, on each rank by itself."""
    spread = Spread((7, 7), (0, 3, 14))
    q, k, v = inputs("linear_attention", spread)[0].values()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    for given, error, said in (
        ((mesh,), ValueError, "mesh: got 2 dimensions"),
        ((2,), TypeError, "mesh: got int, need a DeviceMesh"),
        ((mesh["a"], (7,)), ValueError, r"got \[7\], need 2 numbers"),
        ((mesh["a"], (7, 0.5)), TypeError, r"tokens_per_rank\[1\]: got float"),
        ((mesh["a"], (0, 0)), ValueError, "one of them above 0"),
    ):
        with pytest.raises(error, match=said), fw.context_parallel(*given):
            pass
    with fw.context_parallel(mesh["a"], (7, 7)):
        with pytest.raises(ValueError, match=f"rank: got 14 on rank {rank}"):
            fw.linear_attention(q, k, v)
        own = [spread.own(x, rank) for x in (q, k, v)]
        beyond = torch.tensor([0, 15])
        with pytest.raises(ValueError, match="end at T = 14 or before"):
            fw.linear_attention(*own, cu_seqlens=beyond)
        with pytest.raises(ValueError, match="initial_state: got shape"):
            fw.linear_attention(*own, initial_state=q.new_zeros(2, HV, K, V))
        with pytest.raises(NotImplementedError, match=r"^decode_step: got a"):
            fw.decode_step(*own, state=q.new_zeros(1, HV, K, V))
    assert current_ranks() is None


def raise_on_one_rank(rank):
    """The others wait for its map."""
    spread = Spread((7, 7), None)
    q, k, v = inputs("linear_attention", spread)[0].values()
    q, k, v = (spread.own(x, rank) for x in (q, k, v))
    with spread.context():
        fw.linear_attention(q, k, v[:, :, :3] if rank else v)


def rank_in_mesh(rank):
    """And a mesh is as good as its group."""
    with fw.context_parallel(init_device_mesh("cpu", (2,))):
        return current_ranks().rank


def train(rank, settings, path, save, steps):
    """Losses of a run, which goes on from a file, and saves to another."""
    torch.manual_seed(rank)  # of no matter to it
    run = Training(settings, path)
    losses = []
    while run.steps_done < steps:
        loss = run.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    found = run.evaluate()["bits per byte"]
    run.save(save)
    said = run.sample("1", 4) if run.settings.fsdp else None
    return losses, found, said


def check_kernels(
    rank, name, spread, segments, compiled=False, normalize=False
):
    """In fp32 and chunks of 16, cut into segments; beside PyTorch in fp64.

    Of half of the heads: the interpreter is slow.
    """
    from fastweights.kernels.recurrence import settings

    tokens, shared = inputs(name, spread)
    tokens = {n: x.float()[:, :, : x.shape[2] // 2] for n, x in tokens.items()}
    some = slice(HV // 2)
    half = {"g": some, "initial_state": (slice(None), some)}
    shared = {n: x.float()[half[n]] for n, x in shared.items()}
    of = getattr(fw, name)
    if normalize:
        tokens |= {n: tokens[n].abs() for n in "qk"}
        shared = {n: F.pad(x, (0, 1)).abs() for n, x in shared.items()}
        of = functools.partial(of, normalize=True)
    kernels = functools.partial(of, chunk_size=16, backend="triton")
    if compiled:
        kernels = torch.compile(kernels, fullgraph=True, backend="aot_eager")

    def call(**tensors):
        if current_ranks() is not None:
            with record_backends() as ran:
                o, state = kernels(**tensors)
            assert ran == ["triton forward"]
            return o, state
        cu_seqlens = tensors.pop("cu_seqlens")
        tensors = {n: x.double() for n, x in tensors.items()}
        o, state = of(**tensors, cu_seqlens=cu_seqlens)
        return o.float(), state.float()

    def length(_, __, chunks):
        return -(-chunks // segments)

    settings.lengths_of.cache_clear()
    with mock.patch.object(settings, "segment_chunks", length):
        check_against_whole(rank, call, spread, tokens, shared)
    settings.lengths_of.cache_clear()


def check_same_bits(rank, name):
    """In segments of two chunks, of which each rank has two."""
    from fastweights.kernels.recurrence import settings

    spread = Spread((64,) * dist.get_world_size(), None, False)
    tokens, _ = inputs(name, spread)
    whole = leaves({n: x.float()[:1, :, :1] for n, x in tokens.items()})
    own = leaves({n: spread.own(x.detach(), rank) for n, x in whole.items()})
    call = functools.partial(
        getattr(fw, name), chunk_size=16, backend="triton"
    )
    settings.lengths_of.cache_clear()
    segment = mock.patch.object(settings, "BATCH_INVARIANT_SEGMENT", 32)
    with segment, fw.batch_invariant():
        want, last = call(**whole)
        weight = torch.randn_like(want)
        (weight * want).sum().backward()
        with spread.context():
            found, state = call(**own)
            (spread.own(weight, rank) * found).sum().backward()
    settings.lengths_of.cache_clear()
    assert torch.equal(found, spread.own(want, rank))
    assert torch.equal(state, last)
    for n, x in own.items():
        assert torch.equal(x.grad, spread.own(whole[n].grad, rank)), n
