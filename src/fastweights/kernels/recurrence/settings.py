"""What a call's sizes decide, by rule: tiles, warps, stages; segments.

Nothing is tried out: a call's :class:`CallKind` has its kernels' settings
from its dtype, its widths and the GPU, and its :class:`Lengths` the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from fastweights.kernels.gpu import GPU
from fastweights.kernels.tile import Tiles, min_tile_columns

MIN_SEGMENT_CHUNKS = 5  # below, one border more costs what it saves
MIN_CHUNKS_OF_TWO_ROUNDS = 8  # where maps are found in two rounds
BATCH_INVARIANT_SEGMENT = 8192  # tokens of a segment whatever the call
IntLike = Any  # int, or SymInt where shapes are symbols


class CallKind(NamedTuple):
    """A kind of call, for which kernels are compiled: all but its lengths."""

    gpu: GPU
    dtype: torch.dtype  # of q, k and v
    H: int
    HV: int
    K: int
    V: int
    gate_width: int  # 0, 1 or K
    delta: bool
    chunk_size: int
    precision: str  # gpu.dot_precision
    has_erase_key: bool = False  # by which the delta rule erases instead of k
    on_ranks: bool = False  # other ranks have the tokens before and after

    @property
    def per_head(self) -> bool:
        """Whether each head has one gate."""
        return self.gate_width == 1

    @property
    def per_channel(self) -> bool:
        """Whether each key channel has a gate of its own.

        Then Aqk is kept; else the scans multiply it out again.
        """
        return self.gate_width > 1

    @property
    def has_prefetch_room(self) -> bool:
        """Whether there is room to load tiles before they are needed."""
        half = self.dtype != torch.float32
        return self.gpu.has_large_shared and half and self.K <= 128


@dataclass(frozen=True)
class RecurrenceMeta:
    """Constants of one kernel: its argument META.

    No tuple, which a launch would take for a group of arguments.
    """

    QK_HEADS: int  # HV for q_in and k_out of a gate per channel, else H
    HV: int
    K: int
    V: int  # 0 where no value is looked at
    BT: int  # tokens per chunk
    PER_HEAD: bool  # a gate for each head
    PER_CHANNEL: bool  # one for each of its key channels
    DELTA: bool
    PRECISION: str
    BACK: bool  # whether states are composed from the last
    BK: int
    BV: int = 1
    BJ: int = 1
    TMA: bool = False  # the tensor memory accelerator loads its tiles
    HAS_ERASE_KEY: bool = False
    RANKS: bool = False  # sequences may go on past the last token

    @property
    def GATED(self) -> bool:
        return self.PER_HEAD or self.PER_CHANNEL

    @property
    def NK(self) -> int:
        """Tiles of keys."""
        return -(-self.K // self.BK)

    @property
    def NV(self) -> int:
        """Tiles of values."""
        return -(-self.V // self.BV)

    @property
    def NM(self) -> int:
        """Tiles of a state's map."""
        return -(-self.K // self.BV)

    @property
    def NJ(self) -> int:
        """Tiles of a product over a map's keys."""
        return -(-self.K // self.BJ)

    @property
    def key_tiles(self) -> Tiles:
        """The tiles of q, and of k as it is written."""
        return Tiles(self.QK_HEADS, self.K, self.BT, self.BK, self.TMA)

    @property
    def erase_key_tiles(self) -> Tiles:
        """The tiles of the keys by which the delta rule erases."""
        H = self.HV if self.HAS_ERASE_KEY else self.QK_HEADS
        return Tiles(H, self.K, self.BT, self.BK, self.TMA)

    @property
    def hv_key_tiles(self) -> Tiles:
        """The tiles of K channels per value head: erase_key, gates, q_in."""
        return Tiles(self.HV, self.K, self.BT, self.BK)

    @property
    def value_tiles(self) -> Tiles:
        return Tiles(self.HV, self.V, self.BT, self.BV, self.TMA)

    @property
    def score_tiles(self) -> Tiles:
        """The tiles of Aqk and R."""
        return Tiles(self.HV, self.BT, self.BT, self.BT, self.TMA)

    @property
    def number_tiles(self) -> Tiles:
        """The tiles of one number per token and head."""
        return Tiles(self.HV, 1, self.BT, 1)

    @property
    def part_tiles(self) -> Tiles:
        """The tiles of a number for each value tile of a token and head."""
        return Tiles(self.HV, self.NV, self.BT, 1)

    @property
    def map_tiles(self) -> Tiles:
        """The tiles of states' maps."""
        return Tiles(1, self.K, self.BK, self.BV)


def intra_options(stage: str, kind: CallKind) -> dict[str, int]:
    """Tiles and launch settings of a stage inside of chunks."""
    min_columns, large = (
        min_tile_columns(kind.dtype),
        kind.gpu.has_large_shared,
    )
    BK = 64 if kind.per_channel else min_columns
    if stage in ("intra", "intra_unfactorable", "intra_again"):
        options = {"BK": BK if large else 32, "num_warps": 4, "num_stages": 1}
        if kind.has_prefetch_room and not kind.per_channel:
            options["BK"] = max(min_columns, triton.next_power_of_2(kind.K))
            # four programs a multiprocessor, or three
            options["maxnreg"] = 168 if kind.has_erase_key else 128
        if kind.has_prefetch_room and stage == "intra_again":
            options["maxnreg"] = 168  # three
        return options
    if kind.chunk_size < 64 or not large:
        # In shorter chunks some products would be Hopper's, of 64 rows, and
        # some not, and both read rows under 128 bytes: see TUNING.md. With
        # key tiles of 32 none is.
        BK = 32
    if stage == "gate_backward":
        return {"BK": BK, "num_warps": 1}
    unfactorable = stage == "intra_backward_unfactorable"
    prefetch = kind.has_prefetch_room and kind.chunk_size == 64
    options = {
        "BK": BK,
        "BV": min_columns,
        "num_warps": 4 if prefetch and not unfactorable else 8,
        "num_stages": 2 if prefetch and not kind.gpu.forbids_prefetch else 1,
    }
    if unfactorable and kind.gpu.capability[0] != 9:
        # Left to itself ptxas 12.9 gives up: 32 registers on 8.0, 40 on
        # 10.0. On 9.0 it spills less so.
        options["maxnreg"] = 255
    return options


def compose_options(stage: str, kind: CallKind) -> dict[str, int]:
    """Options of compose_kernel, which is fp32 whatever q's dtype is.

    A state's few programs go from segment to segment, one after the other:
    the fewer values, the shorter a step. Two programs share a multiprocessor.
    """
    BK = max(64, triton.next_power_of_2(kind.K))
    options = {"BJ": 64, "BK": BK, "BV": 16, "num_warps": 8, "num_stages": 1}
    if kind.gpu.has_large_shared and kind.K <= 128:
        options["maxnreg"] = 128
    return options


def scan_options(stage: str, kind: CallKind) -> dict[str, int]:
    """Options of a scan: on an H200 in bf16 128 values, 8 warps, or 64 and 4.

    8 warps share what they load of k, q and R. Two programs of 4 hide what the
    other one waits for: that is worth more where three products depend on each
    other and the rest is little.
    """
    K, V, large = kind.K, kind.V, kind.gpu.has_large_shared
    prefetch = kind.has_prefetch_room
    chained = kind.delta and not kind.per_channel
    if kind.has_erase_key and not kind.gpu.forbids_prefetch:
        chained = False  # there is room for one program, of all its tiles
    BK = max(min_tile_columns(kind.dtype), triton.next_power_of_2(K))
    BV = scan_value_columns(kind)
    wide = prefetch and K > 64 and -V % (2 * BV) < BV  # most of it is there
    if chained and stage in ("segment_maps", "scan"):
        wide = False
    BV = 2 * BV if wide else BV
    num_stages = 3 if wide or stage == "segment_maps" else 2
    back = stage.endswith("backward")
    # keys that erase, and others that write
    two_keys = kind.per_channel or kind.has_erase_key
    if (stage == "scan" or back) and kind.delta and two_keys:
        num_stages = 2  # no room for three
    if not prefetch or kind.gpu.forbids_prefetch:
        num_stages = 1
    # Where loads go ahead of the products, and a tile has neither keys nor
    # values of the next head, by descriptors: there is no mask for columns.
    whole = K == BK and V % BV == 0 and kind.chunk_size == 64
    options = {
        "BK": BK,
        "BV": BV,
        "TMA": num_stages > 1 and whole,
        "num_warps": 4 if large and K <= 128 and not wide else 8,
        "num_stages": num_stages,
    }
    if stage == "segment_maps" and chained and options["TMA"]:
        options |= {"num_stages": 2, "maxnreg": 168}  # three of them
    if kind.dtype == torch.float32:
        # Else a product and the sum after it become one instruction in one
        # of two stages that have to find the same bits, and not in the other.
        options["enable_fp_fusion"] = False
    return options


def scan_value_columns(kind: CallKind) -> int:
    """Value columns of a scan's program, or half of them."""
    BV = min_tile_columns(kind.dtype)
    return BV if kind.gpu.has_large_shared else BV // 2


INTRA_STAGES = (
    "intra",
    "intra_unfactorable",
    "intra_again",
    "intra_backward",
    "intra_backward_unfactorable",
    "gate_backward",
)
SCAN_STAGES = (
    "segment_maps",
    "segment_maps_backward",
    "chunk_states",
    "scan",
    "scan_backward",
)
COMPOSE_STAGES = (
    "compose",
    "compose_backward",
    "add_arriving",
    "add_arriving_backward",
)
OPTIONS: dict[str, Callable[[str, CallKind], dict[str, int]]] = {
    **dict.fromkeys(INTRA_STAGES, intra_options),
    **dict.fromkeys(SCAN_STAGES, scan_options),
    **dict.fromkeys(COMPOSE_STAGES, compose_options),
}
"""The function that finds each stage's tiles and launch settings."""


def settings_of(
    stage: str, kind: CallKind
) -> tuple[RecurrenceMeta, dict[str, int]]:
    """META of a stage's kernel, and its launch settings.

    Measured on an H200 with K = V = 128 in bf16. There, with chunks of 64,
    no row of a tile is under 128 bytes (``tile.min_tile_columns``) but of
    those that compose_kernel turns to columns, for its products. A GPU that
    has less shared memory for one program keeps the operands of its products
    in registers: smaller tiles, more warps.

    On capability 10.x nothing is loaded ahead: there Triton may start a
    product before that of the last iteration is done (TUNING.md).
    """
    options = OPTIONS[stage](stage, kind)
    tiles = ("BK", "BV", "BJ", "TMA")
    sizes: Any = {x: options.pop(x) for x in tiles if x in options}
    inside = stage in INTRA_STAGES
    meta = RecurrenceMeta(
        QK_HEADS=kind.HV if kind.per_channel and not inside else kind.H,
        HV=kind.HV,
        K=kind.K,
        V=kind.V if "BV" in sizes else 0,
        BT=kind.chunk_size,
        PER_HEAD=kind.per_head,
        PER_CHANNEL=kind.per_channel,
        DELTA=kind.delta,
        PRECISION=kind.precision,
        BACK=stage.endswith("backward"),
        HAS_ERASE_KEY=kind.has_erase_key,
        RANKS=kind.on_ranks and not inside,
        **sizes,
    )
    return meta, options


class Lengths(NamedTuple):
    """A call's lengths, and the numbers of things that follow from them.

    Every tensor between the kernels, every grid and every number that a
    kernel is given is a multiple of one of these
    (``schedule.TensorSpec``, ``schedule.RuntimeNumber``).
    """

    B: IntLike
    T: IntLike  # tokens per batch entry
    N: IntLike  # sequences
    L: IntLike  # chunks per segment
    tokens: IntLike  # B T
    slots: IntLike  # one per chunk of a sequence: tile.first_slot
    segments: IntLike  # likewise one per segment
    borders: IntLike  # at the ends of whole segments: segments.border_of


@functools.lru_cache(maxsize=4096)
def lengths_of(
    kind: CallKind,
    B: IntLike,
    T: IntLike,
    N: IntLike,
    packed: bool,
    batch_invariant: bool = False,
) -> Lengths:
    """The lengths of a call of N sequences, ``packed`` or of T tokens each.

    ``batch_invariant``: in segments of BATCH_INVARIANT_SEGMENT tokens.
    """
    C, chunks = kind.chunk_size, -(-T // kind.chunk_size)
    entries = 1 if packed else B
    L = BATCH_INVARIANT_SEGMENT // C
    if not batch_invariant:
        L = segment_chunks(kind, entries, chunks)
    segments = entries * -(-chunks // L)
    borders = entries * (T // (L * C))
    if kind.on_ranks:
        borders = segments + packed
    segments += N if packed else 0
    return Lengths(
        B,
        T,
        N,
        L,
        tokens=B * T,
        slots=chunks + N if packed else B * chunks,
        segments=segments,
        borders=borders,
    )


def segment_chunks(
    kind: CallKind, entries: IntLike, chunks: IntLike
) -> IntLike:
    """Chunks per segment, for so many batch entries of ``chunks`` chunks.

    There are so many segments that two programs of ``scan_value_columns``, or
    one of twice those, run on every multiprocessor, as long as a segment has
    MIN_SEGMENT_CHUNKS. The delta rule's maps, which the first segment does not
    need, have to be found in one round, or in two where their programs are
    large and segments long (maps_at_once). A pack is one entry: only the
    device knows how long each of its sequences is. An entry's last segment is
    shorter: no state that leaves it has to be composed.
    """
    BV, ints = scan_value_columns(kind), type(entries) is type(chunks) is int
    # Those of symbols take a microsecond each.
    smaller, larger = (min, max) if ints else (torch.sym_min, torch.sym_max)
    programs = entries * kind.HV * -(-kind.V // BV)
    most = 2 * kind.gpu.multiprocessors // programs
    number = smaller(most, chunks // MIN_SEGMENT_CHUNKS)
    if kind.delta:
        maps = entries * kind.HV * -(-kind.K // BV)
        one, two = (1 + n // (programs + maps) for n in maps_at_once(kind))
        long = smaller(most, chunks // MIN_CHUNKS_OF_TWO_ROUNDS)
        number = larger(smaller(number, one), smaller(long, two))
    number = larger(number, 1)
    return chunks // number + 1


@functools.lru_cache(maxsize=4096)
def maps_at_once(kind: CallKind) -> tuple[int, int]:
    """Numbers of programs of the delta rule's maps in one round, and in two.

    A multiprocessor has three of them if their registers are bounded, and
    these are found in one round. Else it has two that load by descriptors,
    or one of twice as many values; and of those that do not, one.
    """
    meta, options = settings_of("segment_maps", kind)
    one, two = (3, 3) if "maxnreg" in options else (2 if meta.TMA else 1, 4)
    multiprocessors = kind.gpu.multiprocessors
    return one * multiprocessors, two * multiprocessors
