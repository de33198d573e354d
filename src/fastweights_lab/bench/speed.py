"""How fast each member is, in multiples of what the machine allows.

``fastweights bench members`` times every member,
forward and forward + backward, on the shapes below, beside a peer if one is
asked for. The floor is the longer of two times: each input read once and
each output written once (three times that with the backward) at the rate of
a copy, and the FLOPs of chunks of 64 (three times them) at the rate of a
large matrix product, both measured in the same run.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastweights as fw
from fastweights.arguments import RecurrenceOperands, RecurrenceOptions
from fastweights.compat import fla as compat
from fastweights.ops.common.flops import forward as chunk_flops
from fastweights_lab.bench import nvidia_kda
from fastweights_lab.bench.timing import (
    DEVICE,
    DTYPE,
    ON_GPU,
    Row,
    ceilings,
    host_seconds,
    timeit,
)
from fastweights_lab.records import package_version

CHUNK = 64  # of the floor's FLOPs


class Shape(NamedTuple):
    """Sizes of one call; q, k [B, T, H, K] and v [B, T, HV, V]."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    sequences: tuple[int, ...] = ()
    """Lengths of the sequences that T packs; none: one per row."""
    most: float = 1.0
    """What beta is at most."""


SHAPES = {
    "train": Shape(8, 4096, 16, 16, 128, 128),
    "long": Shape(1, 65536, 16, 16, 128, 128),
    "gva": Shape(1, 32768, 16, 32, 128, 128),
    "d64": Shape(8, 4096, 32, 32, 64, 64),
    "short": Shape(8, 512, 16, 16, 128, 128),
    "packed": Shape(1, 32768, 16, 16, 128, 128, 16 * (2048,)),
    "skewed": Shape(1, 32768, 16, 16, 128, 128, (29498, *15 * (218,))),
    "kimi": Shape(4, 4096, 32, 32, 128, 128),
    "olmo": Shape(4, 4096, 30, 30, 96, 192, most=2.0),
    "mamba2": Shape(4, 4096, 1, 64, 128, 64),
}
"""gva has the heads of Qwen3-Next, the last three those of Kimi Linear, of
OLMo-Hybrid and of Mamba-2 1.3B. In skewed one sequence of 16 holds 90 % of
the tokens of packed."""
ON_CPU = Shape(1, 512, 2, 2, 64, 64)
DECODE = "decode"  # the shape of one token for each of a batch
DECODED = Shape(64, 1, 16, 16, 128, 128)
DECODED_ON_CPU = Shape(2, 1, 2, 2, 64, 64)
STATES = 4  # take turns in decoding: together more than the L2 cache holds
# member -> its gate (None, or how many numbers) and whether it has beta
MEMBERS = {
    "linear_attention": (None, False),
    "retention": ("fixed", False),
    "mamba2": ("head", False),
    "gla": ("channel", False),
    "deltanet": (None, True),
    "gated_deltanet": ("head", True),
    "kda": ("channel", True),
    "comba": ("head", True),
    "gated_deltanet2": ("channel", False),
    "rwkv7": ("channel", False),
}
ERASE = ("comba", "gated_deltanet2", "rwkv7")
"""Erase by a key of their own, which decode_step takes as ``erase_key``; rwkv7
takes two steps per token, by the arguments of flash-linear-attention."""
# mild forgetting, half of it after some 14 steps; next to none, so that
# nothing may be skipped; strong, half at every step; and as the layers of
# published models start
GATES = ("mild", "kept", "strong", "model")
# -5 sigmoid of N(0, 1), and of 2 N(0, 1) - 5: KDA's with a lower bound
SIGMOIDS = {"bounded": (1.0, 0.0), "late": (2.0, -5.0)}
# Never below -5; with "safe", those of trained.
BOUNDED = ("mild", "kept", *SIGMOIDS, "safe")


def inputs(
    member: str,
    shape: Shape,
    gate: str,
    device: str = DEVICE,
    dtype: torch.dtype = DTYPE,
) -> dict[str, Tensor]:
    """q, k of unit length, v normal, beta uniform up to shape.most, and gates.

    q, k, v have this dtype; g, beta are fp32. A shape of packed sequences
    comes with its cu_seqlens.
    """
    torch.manual_seed(0)
    B, T, H, HV, K, V = shape[:6]
    if member == "rwkv7":
        H = HV
    make = functools.partial(torch.randn, device=device)
    width, delta = MEMBERS[member]
    x = {
        "q": F.normalize(make(B, T, H, K), dim=-1).to(dtype),
        "k": F.normalize(make(B, T, H, K), dim=-1).to(dtype),
        "v": make(B, T, HV, V).to(dtype),
    }
    sizes = {"fixed": (HV,), "head": (B, T, HV), "channel": (B, T, HV, K)}
    if width is not None:
        x["g"] = F.logsigmoid(make(sizes[width]))
        if gate != "strong":
            x["g"] /= 16  # GLA's own
        if gate == "kept":
            x["g"].fill_(-1e-3)
        if gate in SIGMOIDS:
            factor, offset = SIGMOIDS[gate]
            x["g"] = -5 * torch.sigmoid(factor * make(sizes[width]) + offset)
        if gate == "model" and member != "gla":
            x["g"] = published(shape, width)
    if delta:
        x["beta"] = shape.most * torch.rand(B, T, HV, device=device)
    if member == "comba":  # a fraction of k, one per head
        x["p"] = make(H, 1).sigmoid().to(dtype) * x["k"]
    if member == "gated_deltanet2":
        x["b"] = torch.rand(B, T, H, K, device=device).to(dtype)
        x["w"] = torch.rand(B, T, HV, V, device=device).to(dtype)
    if member == "rwkv7":  # a unit key, and a share of it, erase
        unit = F.normalize(make(B, T, H, K), dim=-1)
        share = torch.rand(B, T, H, K, device=device)
        x = {"r": x.pop("q"), "w": x.pop("g"), **x}
        x |= {"a": -unit.to(dtype), "b": (share * unit).to(dtype)}
    if shape.sequences:
        lengths = torch.tensor((0, *shape.sequences), device=device)
        x["cu_seqlens"] = lengths.cumsum(0)
    return x


def published(shape: Shape, width: str) -> Tensor:
    """RetNet's gates; or Mamba-2's as they start, with inputs from N(0, 1).

    Gated DeltaNet has the latter too, and KDA, one per channel.
    """
    B, T, _, HV, K, _ = shape[:6]
    if width == "fixed":
        return fw.retnet_log_decay(HV).to(DEVICE)
    each = (HV, K) if width == "channel" else (HV,)
    draw = functools.partial(torch.rand, device=DEVICE)
    A = 1 + 15 * draw(HV, *[1] * (len(each) - 1))
    dt = 10 ** (2 * draw(each) - 3)
    start = dt + (-torch.expm1(-dt)).log()  # softplus of it is dt
    return -A * F.softplus(torch.randn(B, T, *each, device=DEVICE) + start)


def work(member: str, shape: Shape) -> tuple[int, int]:
    """Bytes that a forward must move, and its FLOPs in chunks of 64.

    The FLOPs as :mod:`fastweights.ops.common.flops` counts them.
    """
    B, T, H, HV, K, V = shape[:6]
    width, delta = MEMBERS[member]
    size = torch.finfo(DTYPE).bits // 8
    moved = size * (2 * H * K + 2 * HV * V)
    moved += 4 * HV * {"head": 1, "channel": K}.get(width or "", 0)
    moved += 4 * HV * delta
    moved += size * H * K * (member in ERASE)
    moved += size * HV * V * (member == "gated_deltanet2")
    moved += size * H * K * (member == "rwkv7")  # a and b
    q, v, beta = (B, T, H, K), (B, T, HV, V), (B, T, HV) if delta else None
    erase_key = q if member in ERASE else None
    shapes = RecurrenceOperands._make(
        [q, q, v, None, beta, erase_key, None, None]
    )
    options = RecurrenceOptions(scale=1.0, chunk_size=CHUNK)
    flops = chunk_flops(shapes, options)
    return B * T * moved, flops


def operator(member: str) -> Callable[..., Any]:
    """Ours: of rwkv7 the two steps of compat.fla."""
    if member == "rwkv7":
        return functools.partial(compat.chunk_rwkv7, output_final_state=True)
    return getattr(fw, member)


# peer -> its package, and how it is set for the timing
PEERS = {
    "fla": (
        "fla-core",
        "chunk_o.TRITON_ABOVE_3_7_1 = True: lifts its guard against a "
        "backward that Triton 3.4 to 3.7.0 miscompiles on Hopper; KDA, Gated "
        "DeltaNet-2 and RWKV-7 with safe_gate=True at "
        f"{', '.join(BOUNDED)} gates, above its bound",
    ),
    "flash_qla": ("flash-qla", "as it comes: it drops a state after 10 nats"),
    "attn_gym": (
        "attn_gym",
        f"impl='fused'; KDA at {', '.join(BOUNDED)} gates only: it needs "
        "g >= -5.914",
    ),
    "nvidia": (
        "nvidia-cudnn-frontend",
        "two of its CUDA files, launched by themselves: "
        "fastweights_lab.bench.nvidia_kda",
    ),
    "batch_invariant": ("fastweights", "our own, in fw.batch_invariant()"),
}


def peer_functions(
    peer: str, folder: Path | None = None
) -> dict[str, Callable[..., Any]]:
    """A peer's function for each member that it has.

    "fla" is flash-linear-attention (fla-core), "flash_qla" is FlashQLA,
    "attn_gym" is Attention Gym, "nvidia" what is in a folder:
    :mod:`fastweights_lab.bench.nvidia_kda`; "batch_invariant" is ours, with
    the bits that each sequence has alone. With FlashQLA installed fla hands
    Gated DeltaNet to it, so fla's own Triton kernels are timed where it is
    not.

    Raises:
        SystemExit: the package is not installed.
    """
    found: dict[str, Callable[..., Any]] = {}
    try:
        if peer == "fla":
            from fla.ops.comba import chunk_comba
            from fla.ops.common import chunk_o
            from fla.ops.delta_rule import chunk_delta_rule
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule
            from fla.ops.gdn2 import chunk_gdn2
            from fla.ops.gla import chunk_gla
            from fla.ops.kda import chunk_kda
            from fla.ops.linear_attn import chunk_linear_attn
            from fla.ops.rwkv7 import chunk_rwkv7
            from fla.ops.simple_gla import chunk_simple_gla

            # Its guard against a miscompiled backward; we time K = 128 only.
            chunk_o.TRITON_ABOVE_3_7_1 = True
            found = {
                "linear_attention": functools.partial(
                    chunk_linear_attn, normalize=False
                ),
                "mamba2": chunk_simple_gla,
                "gla": chunk_gla,
                "deltanet": chunk_delta_rule,
                "gated_deltanet": chunk_gated_delta_rule,
                "kda": chunk_kda,
                "comba": chunk_comba,
                "gated_deltanet2": chunk_gdn2,
                "rwkv7": chunk_rwkv7,
            }
        elif peer == "flash_qla":
            from flash_qla import chunk_gated_delta_rule

            found = {"gated_deltanet": chunk_gated_delta_rule}
        elif peer == "nvidia":
            found = nvidia_kda.functions(folder)
        elif peer == "batch_invariant":
            for name in MEMBERS:
                found[name] = functools.partial(
                    _batch_invariant, operator(name)
                )
        else:
            from attn_gym.linear import chunk_gdn, chunk_kda

            for name, theirs in (
                ("gated_deltanet", chunk_gdn),
                ("kda", chunk_kda),
            ):
                found[name] = functools.partial(_attn_gym, theirs)
    except ImportError as error:
        message = f"--peer {peer} needs the package {PEERS[peer][0]}: {error}"
        raise SystemExit(message) from error
    return {
        name: functools.partial(function, output_final_state=True)
        for name, function in found.items()
    }


def _batch_invariant(
    function: Callable, *, output_final_state: bool, **x: Any
) -> Any:
    with fw.batch_invariant():
        return function(**x)


def _attn_gym(
    function: Callable, *, g: Tensor, cu_seqlens: Any = None, **x: Any
) -> Any:
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.int()
    return function(gate=g, cu_seqlens=cu_seqlens, **x)


def peer_versions(peers: Iterable[str]) -> dict[str, Row]:
    """What a record says of the peers beside which members were timed."""
    return {
        peer: {
            "package": package,
            "version": package_version(package),
            "setting": setting,
        }
        for peer, (package, setting) in PEERS.items()
        if peer in peers
    }


def peer_takes(peer: str, member: str, shape: Shape, gate: str) -> bool:
    """Whether a peer that has the member is right for these inputs."""
    _, _, H, HV, K, V = shape[:6]
    if peer == "fla":  # its guard is about K = 64
        return K > 64 and (H == HV or member in ("gated_deltanet", "kda"))
    if peer == "batch_invariant":
        return True
    if peer in ("attn_gym", "nvidia") and member == "kda":
        return K == V == 128 and H == HV and gate in BOUNDED
    return K == V == 128


def peers_for(
    rivals: dict[str, dict[str, Callable[..., Any]]],
    member: str,
    shape: Shape,
    gate: str,
) -> dict[str, Callable[..., Any]]:
    """The peers that take these inputs, each set as it is fastest on them.

    ``rivals`` are the :func:`peer_functions` of each peer.
    """
    found = {
        peer: theirs[member]
        for peer, theirs in rivals.items()
        if member in theirs and peer_takes(peer, member, shape, gate)
    }
    bounded = "kda", "gated_deltanet2", "rwkv7"
    safe = member in bounded and gate in BOUNDED
    if safe and "fla" in found:
        found["fla"] = functools.partial(found["fla"], safe_gate=True)
    return found


def passes(
    function: Callable[..., tuple[Tensor, Tensor]], x: dict[str, Tensor]
) -> dict[str, Callable[[], object]]:
    """A forward without gradients, and a forward with its backward."""
    leaves = {
        name: t.detach().requires_grad_()
        for name, t in x.items()
        if t.is_floating_point()
    }
    do = torch.randn_like(x["v"])

    def forward() -> object:
        with torch.no_grad():
            return function(**x)

    def both() -> object:
        o, _ = function(**{**x, **leaves})
        return torch.autograd.grad(o, [*leaves.values()], do)

    return {"forward": forward, "forward+backward": both}


_FIRST = """
import time, torch
from fastweights_lab.bench import speed
x = speed.inputs({member!r}, speed.Shape(1, 256, 2, 2, 128, 128), "mild")
torch.cuda.synchronize() if speed.ON_GPU else None
start = time.perf_counter()
speed.passes(speed.operator({member!r}), x)["forward+backward"]()
torch.cuda.synchronize() if speed.ON_GPU else None
print(time.perf_counter() - start)
"""


def first_seconds(member: str) -> float:
    """Seconds to the first gradient, Triton's cache empty, in a process."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _FIRST.format(member=member)],
            env={**os.environ, "TRITON_CACHE_DIR": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return float(done.stdout.split()[-1])


def decode_round(name: str, shape: Shape) -> tuple[Callable, int]:
    """One token for each of STATES states in turn, and the bytes of a token.

    What a step must move: its state, read and written, the token and its
    output. On a GPU a graph is replayed: no host between the steps.
    """
    x: dict[str, Any] = inputs(name, shape, GATES[0])
    B, _, _, HV, K, V = shape[:6]
    size = (B, HV, K, V)
    states = [torch.zeros(size, device=DEVICE) for _ in range(STATES)]

    def step() -> None:
        for state in states:
            fw.decode_step(**x, state=state)

    tensors = (*x.values(), x["v"])  # o is like v
    moved = 8 * states[0].numel()
    moved += sum(t.numel() * t.element_size() for t in tensors)
    if not ON_GPU:
        return step, moved
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    # PyTorch gives its cache back before it captures, and for a while the
    # driver clears what it got, at the rate of memory too.
    time.sleep(1)
    # The lambda keeps step, and with it the tensors that the graph reads.
    return lambda _=step: graph.replay(), moved


def members(
    members: Sequence[str],
    shapes: Sequence[str],
    gates: Sequence[str],
    peer: Sequence[str] = (),
    peer_path: Path | None = None,
    no_first: bool = False,
) -> Iterator[Row]:
    """Ceilings; then each member's times on each shape, gate and pass.

    Rows of the case ``members``: seconds, moved and flops (the floor's),
    floor (seconds), host (seconds a call). On a CPU there is one shape
    besides "decode", "small", and host is None. Of "decode" there are what
    a step moves, and its time.
    """
    copy, matmul = ceilings()
    yield from (copy, matmul)
    bandwidth = copy["moved"] / copy["seconds"]
    rate = matmul["flops"] / matmul["seconds"]
    rivals = {who: peer_functions(who, peer_path) for who in peer}
    for name in members:
        if not no_first:
            seconds = first_seconds(name)
            yield {"member": name, "what": "first", "seconds": seconds}
        if DECODE in shapes and name not in ERASE:
            fn, moved = decode_round(
                name, DECODED if ON_GPU else DECODED_ON_CPU
            )
            yield {
                "member": name,
                "shape": DECODE,
                "who": "fastweights",
                "what": "step",
                "seconds": timeit(fn) / STATES,
                "floor": moved / bandwidth,
                "moved": moved,
            }
        sequences = [where for where in shapes if where != DECODE]
        for where in sequences if ON_GPU else ["small"]:
            shape = SHAPES.get(where, ON_CPU)
            moved, flops = work(name, shape)
            for gate in gates if MEMBERS[name][0] else GATES[:1]:
                x = inputs(name, shape, gate)
                functions = {"fastweights": operator(name)}
                functions |= peers_for(rivals, name, shape, gate)
                for who, function in functions.items():
                    for what, fn in passes(function, x).items():
                        times = 3 if "backward" in what else 1
                        yield {
                            "member": name,
                            "shape": where,
                            "gate": gate,
                            "who": who,
                            "what": what,
                            "seconds": timeit(fn),
                            "floor": times
                            * max(moved / bandwidth, flops / rate),
                            "moved": times * moved,
                            "flops": times * flops,
                            "host": host_seconds(fn),
                        }


def crossover() -> Iterator[Row]:
    """Forward time by sequence length T, at a constant B T.

    Every T then does the same linear work on a full GPU: linear attention
    is a level line, and softmax attention climbs through it.
    """
    H = 16 if ON_GPU else 2
    tokens = 65536 if ON_GPU else 8192
    lengths = range(8, 17) if ON_GPU else range(9, 14)
    for D in (64, 128) if ON_GPU else (64,):
        for T in (2**i for i in lengths):
            B = tokens // T
            shape = {"B": B, "T": T, "H": H, "D": D}
            yield from _timed(_forms(*_inputs(**shape)), shape)


def _inputs(B: int, T: int, H: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, unit k and v, drawn at random."""
    q, k, v = torch.randn(3, B, T, H, D, device=DEVICE, dtype=DTYPE)
    return q, F.normalize(k, dim=-1), v


def _timed(forms: dict[str, Callable], shape: Row) -> Iterator[Row]:
    for form, fn in forms.items():
        seconds = timeit(fn, repeats=20 if ON_GPU else 3)
        yield {"form": form, **shape, "seconds": seconds}


def _forms(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 64
) -> dict[str, Callable]:
    """Causal attention in each form; the kernels only where they compile."""
    q_h, k_h, v_h = (x.transpose(1, 2) for x in (q, k, v))
    forms: dict[str, Callable] = {
        "softmax": lambda: F.scaled_dot_product_attention(
            q_h, k_h, v_h, is_causal=True
        ),
        "chunkwise": lambda: fw.linear_attention(
            q, k, v, backend="torch", chunk_size=chunk_size
        ),
    }
    if ON_GPU:
        from fastweights_lab.lessons.linear import scan
        from fastweights_lab.lessons.prefix import parallel_scan

        for fn in (scan, parallel_scan):
            forms[fn.__name__] = functools.partial(
                fn, q, k, v, scale=q.shape[-1] ** -0.5, chunk_size=chunk_size
            )
    return forms


def chunks() -> Iterator[Row]:
    """Forward time by tokens per chunk, the GPU filled by B H sequences."""
    B, T, H = (8, 8192, 16) if ON_GPU else (1, 2048, 2)
    for D in (64, 128) if ON_GPU else (64,):
        q, k, v = _inputs(B, T, H, D)
        beta = torch.rand(B, T, H, device=DEVICE).to(DTYPE)
        for C in (16, 32, 64):
            forms = _forms(q, k, v, C)
            del forms["softmax"]
            forms["deltanet"] = functools.partial(
                fw.deltanet, q, k, v, beta, chunk_size=C
            )
            yield from _timed(forms, {"B": B, "T": T, "H": H, "D": D, "C": C})


def decode() -> Iterator[Row]:
    """Time of one new token after n, and the bytes kept for it."""
    B, H, D = (64, 16, 128) if ON_GPU else (4, 2, 64)
    shape = {"B": B, "H": H, "D": D}
    draw = functools.partial(torch.randn, device=DEVICE, dtype=DTYPE)
    q, k, v = draw(3, B, H, 1, D)
    state = torch.zeros(B, H, D, D, device=DEVICE)

    def step() -> Tensor:
        state.addcmul_(k.mT.float(), v.float())
        return (q.float() @ state).to(DTYPE)

    row = {"form": "linear", **shape, "kept": state.nbytes}
    yield row | {"seconds": timeit(step)}
    for n in (2**i for i in range(8, 17 if ON_GPU else 13)):
        keys, values = draw(2, B, H, n, D)

        def attend(keys: Tensor = keys, values: Tensor = values) -> Tensor:
            keys[:, :, -1:], values[:, :, -1:] = k, v
            return F.scaled_dot_product_attention(q, keys, values)

        row = {"form": "softmax", **shape, "n": n, "kept": 2 * keys.nbytes}
        yield row | {"seconds": timeit(attend)}
