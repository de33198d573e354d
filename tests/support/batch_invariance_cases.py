"""One sequence alone, in company, and cut into several calls."""

import itertools

import torch
from torch import Tensor

import fastweights as fw
from support.inputs import member_inputs

EDGES = "initial_state", "dstate"
Tensors = dict[str, Tensor]


def case_inputs(
    gate, rule, edges, B, T, seed, dtype, device, **sizes
) -> Tensors:
    """Inputs, gradients of o and, of ``edges``, states and their gradients.

    Gates are weak: what enters a segment is seen behind it.
    """
    sizes["dtype"] = torch.float32
    x = member_inputs(gate, rule, B=B, T=T, seed=seed, **sizes)
    x["do"] = torch.randn_like(x["v"])
    x["dstate"] = torch.randn_like(x["initial_state"])
    if "g" in x:
        x["g"] /= T
    narrow = "q", "k", "v", "erase_key", "do"
    return {
        name: t.to(device, dtype if name in narrow else None)
        for name, t in x.items()
        if name in edges or name not in EDGES
    }


def results_of_calls(x: Tensors, calls=None, **options) -> Tensors:
    """Results and gradients, in several ``calls`` of so many tokens each."""
    leaves = {
        name: t.detach().requires_grad_()
        for name, t in x.items()
        if name not in ("do", "dstate")
    }
    state, outputs = leaves.get("initial_state"), []
    tokens = [name for name in leaves if name != "initial_state"]
    lengths = calls or [x["q"].shape[1]]
    with fw.batch_invariant():
        for some in zip(
            *(leaves[n].split(lengths, 1) for n in tokens), strict=True
        ):
            o, state = fw.linear_recurrence(
                **dict(zip(tokens, some, strict=True)),
                initial_state=state,
                **options,
            )
            outputs.append(o)
    found = {"o": torch.cat(outputs, 1), "state": state}
    wanted = ["o", *(["state"] if "dstate" in x else [])]
    grads = torch.autograd.grad(
        [found[n] for n in wanted],
        [*leaves.values()],
        [x[f"d{n}"] for n in wanted],
    )
    found |= {f"d{n}": t for n, t in zip(leaves, grads, strict=True)}
    return {name: t.detach() for name, t in found.items()}


def in_company(x: Tensors, rows: Tensors, packed: list[Tensors], **options):
    """Results of x among two ``rows``, and between two that are ``packed``."""
    batch = {n: torch.cat([t[:1], x[n], t[1:]]) for n, t in rows.items()}
    found = results_of_calls(batch, **options)
    yield {n: t[1:2] for n, t in found.items()}

    packed.insert(1, x)
    ends = [0, *itertools.accumulate(y["q"].shape[1] for y in packed)]
    offsets = torch.tensor(ends, device=x["q"].device)
    pack = {
        n: torch.cat([y[n] for y in packed], 0 if n in EDGES else 1) for n in x
    }
    found = results_of_calls(pack, cu_seqlens=offsets, **options)
    yield {
        n: t[1:2] if n.endswith("state") else t[:, ends[1] : ends[2]]
        for n, t in found.items()
    }


def check_invariance(
    gate, rule, edges, T, others, segment, sizes, **options
) -> None:
    """The same bits alone, in company, and cut where segments end.

    Beside one of T tokens are two more in a batch, or two others in a pack;
    without a ``segment`` it is not cut.
    """
    x, rows, *packed = (
        case_inputs(gate, rule, edges, B, n, seed, **sizes)
        for seed, (B, n) in enumerate([(1, T), (2, T), *others])
    )
    want = results_of_calls(x, **options)
    found = [*in_company(x, rows, packed, **options)]
    if segment:
        whole, rest = divmod(T, segment)
        calls = [segment] * whole + [rest] * (rest > 0)
        found.append(results_of_calls(x, calls, **options))
        calls = [T - calls[-1], calls[-1]]
        found.append(results_of_calls(x, calls, **options))
    for other in found:
        differ = [n for n in want if not torch.equal(other[n], want[n])]
        assert not differ, differ
