"""Inputs that the tests share, and an independent judge of the recurrence."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights.checks import relative_error

GATES = ("none", "fixed", "head", "channel")
RULES = ("additive", "delta", "erase")

Results = dict[str, Tensor]


def member_inputs(
    gate: str,
    rule: str,
    *,
    B: int = 1,
    T: int = 40,
    H: int = 1,
    HV: int = 2,
    K: int = 6,
    V: int = 5,
    N: int | None = None,
    dtype: torch.dtype = torch.float64,
    strength: float | str = "mixed",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random inputs of one member of the family, unit keys, beta in [0, 1].

    An erasing key is the key times a strength in [0, 1] per channel.
    ``strength`` is the constant value of g, or "mixed" for gates of many
    sizes side by side. N is the number of initial states, B unless given.
    """
    torch.manual_seed(seed)
    x = {
        "q": torch.randn(B, T, H, K),
        "k": F.normalize(torch.randn(B, T, H, K), dim=-1),
        "v": torch.randn(B, T, HV, V),
        "initial_state": torch.randn(N or B, HV, K, V),
    }
    shape = {
        "fixed": (HV,),
        "head": (B, T, HV),
        "channel": (B, T, HV, K),
    }.get(gate)
    if shape and strength == "mixed":
        sizes = torch.tensor([0, 1e-3, 0.05, 0.3, 1, 5, 10, 20])
        x["g"] = -sizes[torch.randint(len(sizes), shape)] * torch.rand(shape)
    elif shape:
        x["g"] = torch.full(shape, float(strength))
    if rule == "delta":
        x["beta"] = torch.rand(B, T, HV)
    if rule == "erase":
        k = x["k"].repeat_interleave(HV // H, 2)
        x["erase_key"] = torch.rand(B, T, HV, K) * k
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: t.to(wide if name == "initial_state" else dtype)
        for name, t in x.items()
    }


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    erase_key: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The defining equations, one head at a time, with K x K matrices."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    eye = torch.eye(K, dtype=q.dtype)
    heads, states = [], []
    for b in range(B):
        for h in range(HV):
            S = torch.zeros(K, V, dtype=q.dtype)
            if initial_state is not None:
                S = initial_state[b, h]
            o = []
            for t in range(T):
                q_t, k_t = q[b, t, h * H // HV], k[b, t, h * H // HV]
                forget, correct, write = eye, eye, v[b, t, h]
                if g is not None:
                    g_t = g[h] if g.dim() == 1 else g[b, t, h]
                    forget = torch.diag(g_t.exp().expand(K))
                if beta is not None:
                    correct = eye - beta[b, t, h] * torch.outer(k_t, k_t)
                    write = beta[b, t, h] * write
                if erase_key is not None:
                    e_t = erase_key[b, t, h * erase_key.shape[2] // HV]
                    correct = eye - torch.outer(k_t, e_t)
                S = correct @ forget @ S + torch.outer(k_t, write)
                o.append(scale * (q_t @ S))
            heads.append(torch.stack(o))
            states.append(S)
    o = torch.stack(heads).unflatten(0, (B, HV)).movedim(1, 2)
    return o, torch.stack(states).unflatten(0, (B, HV))


def results(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: dict[str, Tensor],
    *,
    use: str = "both",
    wanted: tuple[str, ...] | None = None,
    **options: object,
) -> Results:
    """o, state and the gradient of each input, from a fixed random loss.

    ``use`` is "o", "state" or "both": what the loss looks at. ``wanted``
    names the inputs that require a gradient, all unless given.
    """
    wanted = tuple(inputs) if wanted is None else wanted
    x = {
        name: t.detach().requires_grad_(name in wanted)
        for name, t in inputs.items()
    }
    o, state = function(**x, **options)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64, device=o.device)
    for name, y in (("o", o), ("state", state)):
        # In the narrow dtype, so that every dtype has the same loss.
        dy = torch.randn(y.shape, generator=generator).to(torch.bfloat16)
        if use in (name, "both"):
            loss = loss + (y.double() * dy.to(y.device)).sum()
    if loss.requires_grad:
        loss.backward()
    grads = {f"d{name}": t.grad for name, t in x.items() if name in wanted}
    none = {n: torch.zeros_like(x[n[1:]]) for n in grads if grads[n] is None}
    return {"o": o.detach(), "state": state.detach()} | grads | none


def assert_same(
    x: Results | Sequence[torch.Tensor | None],
    ref: Results | Sequence[torch.Tensor | None],
    tolerance: float | dict[str, float],
) -> None:
    """Assert that every result is within its relative RMS error of ref's."""
    x, ref = (
        y if isinstance(y, dict) else dict(enumerate(y)) for y in (x, ref)
    )
    assert x.keys() == ref.keys()
    for name in x:
        allowed = tolerance
        if isinstance(tolerance, dict):
            allowed = tolerance[name]
        assert (x[name] is None) == (ref[name] is None), name
        if x[name] is not None:
            error = relative_error(x[name], ref[name])
            assert error <= allowed, f"{name}: {error:.1e} > {allowed:.0e}"


class Largest(TorchDispatchMode):
    """The most elements and bytes of any tensor that is made, the elements of
    all of them, and how often each operator was called."""

    elements = nbytes = total = 0

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.calls[func.overloadpacket.__name__] += 1
        made = not (func._schema.is_mutable or func.is_view)
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and made:
                self.elements = max(self.elements, x.numel())
                self.nbytes = max(self.nbytes, x.nbytes)
                self.total += x.numel()
        return out
