"""Text for language models: files, tokens, and the batches of every step.

    corpus = read(["stdlib"])           # or paths of files and folders
    stream = Stream.of(corpus.train, ByteTokenizer())
    batch = Windows(stream, length=256, rows=8).batch(step=0)
    batch.tokens, batch.targets         # [8, 256] each

Batches are functions of a seed and of the step, so that a run can go on
from any step, and several processes can each take their part.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from fastweights.arguments import check_sizes

STDLIB = "4257fb64c0a7257a72875be09ea5f448eed2730860f03b97cc54ce5a9668428b"
"""The sha256 of the library's text, which every recorded run has read."""

HELD_OUT = 0.05


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and to be tested on, with what tells them."""

    train: list[bytes]
    held_out: list[bytes]
    size: int
    """Bytes of all documents."""
    sha256: str
    """The hash of all documents, one after the other."""


def read(
    sources: Sequence[str | Path] = ("stdlib",),
    suffixes: Iterable[str] = (".py", ".txt", ".md"),
) -> Corpus:
    """Documents of files, one each, the last 5 % of them held out.

    Files are sorted by their path; what is hidden, empty or equal to an
    earlier file is left out. Of a single file the last 5 % of its bytes are
    held out.

    Args:
        sources: files, folders, or "stdlib": :func:`library`.
        suffixes: of the files that are taken from folders.

    Raises:
        TypeError: sources or suffixes is one string.
        ValueError: there is no such path, or no text in it.
        OSError: a file cannot be read.
    """
    for name, words in (("sources", sources), ("suffixes", suffixes)):
        if isinstance(words, str):
            raise TypeError(f"{name}: got {words!r}, need a list of strings")
    sources, suffixes = tuple(sources), tuple(suffixes)
    documents: list[bytes] = []
    before = {b""}
    for source in dict.fromkeys(sources):
        if source == "stdlib":
            found = library()
        else:
            paths = files(source, suffixes)
            found = [*dict.fromkeys(path.read_bytes() for path in paths)]
        documents += [x for x in found if x not in before]
        before.update(found)
    if not documents:
        named = ", ".join(map(str, sources)) or "no source"
        raise ValueError(f"corpus: got {named}, which holds no text")
    whole = b"".join(documents)
    if len(documents) == 1:
        cut = len(whole) - max(1, round(HELD_OUT * len(whole)))
        train, held_out = [whole[:cut]], [whole[cut:]]
    else:
        cut = len(documents) - max(1, round(HELD_OUT * len(documents)))
        train, held_out = documents[:cut], documents[cut:]
    sha256 = hashlib.sha256(whole).hexdigest()
    return Corpus(train, held_out, len(whole), sha256)


def library() -> list[bytes]:
    """The modules of CPython 3.12.3's standard library, without its tests.

    511 files in the order of their paths, as Ubuntu 24.04 packages them;
    ``test``, ``idlelib``, ``lib2to3``, ``turtledemo`` and ``ensurepip`` are
    left out. The archive ``data/stdlib.tar.gz`` holds their licences too.

    Raises:
        ValueError: the archive holds another text.
    """
    archive = resources.files("fastweights_lab") / "data" / "stdlib.tar.gz"
    documents = []
    with archive.open("rb") as file, tarfile.open(fileobj=file) as members:
        for member in members:
            text = members.extractfile(member)
            if text is not None and member.name.endswith(".py"):
                documents.append(text.read())
    sha256 = hashlib.sha256(b"".join(documents)).hexdigest()
    if sha256 != STDLIB:
        raise ValueError(
            f"corpus: got {archive} with sha256 {sha256[:12]}.., need "
            f" {STDLIB[:12]}..: install fastweights again"
        )
    return documents


def files(source: str | Path, suffixes: tuple[str, ...]) -> list[Path]:
    """A file, or those of a folder, sorted and without hidden ones."""
    root = Path(source)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(
            f"corpus: got {root}, need a file, a folder or stdlib"
        )
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(folder, name)
            for name in names
            if name.endswith(suffixes) and not name.startswith(".")
        ]
    found = sorted(path for path in found if path.is_file())
    if not found:
        raise ValueError(
            f"corpus: got {root}, which has no file that ends in "
            f"{', '.join(suffixes)}"
        )
    return found


class ByteTokenizer:
    """Every byte is a token, and 256 begins a document."""

    vocab_size = 257
    separator = 256
    """The token with which every document begins."""
    sha256: str | None = None
    """The hash of its file."""

    def encode(self, text: bytes) -> Int[Tensor, " T"]:
        """The tokens of bytes, which need not be UTF-8."""
        if not text:
            return torch.empty(0, dtype=torch.int64)
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return whole.to(torch.int64)

    def decode(self, tokens: Int[Tensor, " T"]) -> str:
        """The text without separators; with a mark for what is no UTF-8."""
        values = [x for x in tokens.tolist() if x < 256]
        return bytes(values).decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizer of the package tokenizers, from its tokenizer.json.

    One token is added to its vocabulary, which begins a document. Texts are
    encoded whole, whatever the file says of truncation and padding, and a
    special token's name in a text is text.

    Raises:
        ImportError, OSError: there is no such package, or no such file.
        ValueError: the package cannot read the file.
    """

    def __init__(self, path: str | Path) -> None:
        import tokenizers

        self.file = Path(path).read_bytes()
        try:
            self._inner: Any = tokenizers.Tokenizer.from_buffer(self.file)
        except Exception as error:  # the package has no class of its own
            raise ValueError(
                f"tokenizer: got {path}, which tokenizers cannot read: {error}"
            ) from None
        self.sha256: str | None = hashlib.sha256(self.file).hexdigest()
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        # Not their number, as there may be gaps in the tokens.
        self.separator = max(self._inner.get_vocab().values(), default=-1) + 1
        self.vocab_size = self.separator + 1

    def encode(self, text: bytes) -> Int[Tensor, " T"]:
        """The tokens of UTF-8, with a mark where it is none."""
        return torch.tensor(next(self.encoded([text])), dtype=torch.int64)

    def encoded(self, texts: Sequence[bytes]) -> Iterator[list[int]]:
        """The tokens of each; 64 at a time, on all processors."""
        for i in range(0, len(texts), 64):
            decoded = [x.decode("utf-8", "replace") for x in texts[i : i + 64]]
            for found in self._inner.encode_batch(
                decoded, add_special_tokens=False
            ):
                yield found.ids

    def decode(self, tokens: Int[Tensor, " T"]) -> str:
        """The text of the tokens, without separators."""
        values = [x for x in tokens.tolist() if x != self.separator]
        return self._inner.decode(values, skip_special_tokens=False)


Tokenizer = ByteTokenizer | FileTokenizer


@dataclass(frozen=True)
class Stream:
    """Documents one after the other, each after a separator."""

    tokens: Int[Tensor, " L"]
    """The tokens, in the narrowest dtype that holds them."""
    starts: Int[Tensor, " N+1"]
    """Where documents begin, and L."""
    size: int
    """Bytes that the documents have."""

    @classmethod
    def of(cls, documents: Sequence[bytes], tokenizer: Tokenizer) -> Stream:
        """Make a stream of documents, each encoded by itself.

        Raises:
            ValueError: there is none.
        """
        if not documents:
            raise ValueError("documents: got none, need one or more")
        dtype = torch.int16 if tokenizer.vocab_size <= 32768 else torch.int32
        starts = [0]
        if isinstance(tokenizer, ByteTokenizer):  # a byte each, in one pass
            whole = bytearray(1).join([b"", *documents])
            tokens = torch.frombuffer(whole, dtype=torch.uint8).to(dtype)
            starts += accumulate(len(x) + 1 for x in documents)
        else:
            narrow = array("h" if dtype == torch.int16 else "i")
            for encoded in tokenizer.encoded(documents):
                narrow.append(0)
                narrow.extend(encoded)
                starts.append(len(narrow))
            tokens = torch.frombuffer(narrow, dtype=dtype)
        begin = torch.tensor(starts)
        tokens[begin[:-1]] = tokenizer.separator
        return cls(tokens, begin, sum(map(len, documents)))

    @property
    def tokens_per_byte(self) -> float:
        """The factor by which nats per token become nats per byte."""
        return len(self.tokens) / self.size


@dataclass(frozen=True)
class Batch:
    """Tokens, the tokens after them, and where packed documents begin."""

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    cu_seqlens: Int[Tensor, " N+1"] | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        cu = self.cu_seqlens
        return Batch(
            self.tokens.to(device),
            self.targets.to(device),
            None if cu is None else cu.to(device),
        )


@dataclass(frozen=True)
class Windows:
    """Windows of ``length`` tokens from anywhere, ``rows`` per step."""

    stream: Stream
    length: int
    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes(length=self.length, rows=self.rows)
        if len(self.stream.tokens) <= self.length:
            raise ValueError(
                f"length: got {self.length}, need less than the "
                f"{len(self.stream.tokens)} tokens of the corpus"
            )

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """One of so many equal parts of a step's batch."""
        last = len(self.stream.tokens) - self.length
        starts = torch.randint(
            last, (self.rows,), generator=generator(self.seed, step)
        )
        return windows(self.stream, self.length, starts.chunk(parts)[part])


@dataclass(frozen=True)
class Packed:
    """Whole documents packed, ``length`` tokens per step, each read once.

    The documents are shuffled anew for each pass. Where a step's tokens end
    a document is cut, and its rest begins the next step's.
    """

    stream: Stream
    length: int
    seed: int = 0
    _passes: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_sizes(length=self.length)
        if len(self.stream.tokens) < self.length:
            raise ValueError(
                f"tokens: got {self.length} per step, need no more than the "
                f"{len(self.stream.tokens)} tokens of the corpus"
            )

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """One of so many equal parts of a step's batch, with B = 1."""
        whole = len(self.stream.tokens)
        epoch, step = divmod(step, whole // self.length)
        bounds, shifts = self._pass(epoch)
        T = self.length // parts
        first = step * self.length + part * T
        end = min(first + T + 1, whole)  # one more, as the last's target
        a = int(torch.searchsorted(bounds, first, right=True)) - 1
        b = int(torch.searchsorted(bounds, end))
        lengths = bounds[a : b + 1].clamp(first, end).diff()
        at = shifts[a:b].repeat_interleave(lengths)  # in the stream
        at += torch.arange(first, end)
        tokens = self.stream.tokens.index_select(0, at).to(torch.int64)
        if end < first + T + 1:  # the next document's separator
            tokens = torch.cat([tokens, self.stream.tokens[:1].long()])
        inner = bounds[a + 1 : b] - first
        inner = inner[inner < T]
        cu = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), T)])
        return Batch(tokens[None, :-1], tokens[None, 1:], cu.to(torch.int32))

    def _pass(
        self, epoch: int
    ) -> tuple[Int[Tensor, " N+1"], Int[Tensor, " N"]]:
        """Where shuffled documents begin, and how far off the stream's are.

        Of the last pass that was asked for they are kept.
        """
        found = self._passes.get(epoch)
        if found is None:
            starts = self.stream.starts
            order = torch.randperm(
                len(starts) - 1, generator=generator(self.seed, epoch)
            )
            bounds = F.pad(starts.diff()[order].cumsum(0), (1, 0))
            self._passes.clear()
            found = bounds, starts[order] - bounds[:-1]
            self._passes[epoch] = found
        return found


def windows(stream: Stream, length: int, starts: Int[Tensor, " B"]) -> Batch:
    """The windows that begin at these tokens."""
    at = starts[:, None] + torch.arange(length + 1)
    rows = stream.tokens[at].to(torch.int64)
    return Batch(rows[:, :-1], rows[:, 1:])


def first_windows(stream: Stream, length: int, most: int) -> Batch:
    """The first windows, which do not overlap; shorter if the stream is."""
    length = min(length, len(stream.tokens) - 1)
    number = min(most, (len(stream.tokens) - 1) // length)
    return windows(stream, length, torch.arange(number) * length)


def generator(seed: int, step: int) -> torch.Generator:
    """A generator of random numbers that depend on seed and step alone."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def repeated(batch: Batch, n: int = 5) -> Bool[Tensor, "B T"]:
    """Which targets complete an n-gram that stood in the window before.

    How well a model predicts these shows what it can recall (Arora et al.
    2023, section 3).
    """
    rows = torch.cat([batch.tokens[:, :1], batch.targets], 1)
    found = torch.zeros_like(batch.targets, dtype=torch.bool)
    if rows.shape[1] < n + 1:
        return found
    kind = tokens = rows.long() - rows.min()
    size = vocab_size = int(tokens.max()) + 1
    for i in range(1, n):  # one number for each n-gram
        if size * vocab_size > 2**63:
            kinds, kind = kind.unique(return_inverse=True)
            size = len(kinds)
        kind = kind[:, :-1] * vocab_size + tokens[:, i:]
        size *= vocab_size
    kind, order = kind.sort(dim=1, stable=True)
    again = torch.zeros_like(kind, dtype=torch.bool)
    again[:, 1:] = kind[:, 1:] == kind[:, :-1]
    found[:, n - 2 :] = again.scatter(1, order, again)
    return found
