"""torch.compile: a function whole, in one graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend


@contextmanager
def in_one_graph(
    function: Any, backend: str = "aot_eager", *, most: int = 1, **options: Any
) -> Iterator[Callable]:
    """The function compiled, of which ``most`` graphs may be made."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    yield torch.compile(function, backend=counter, fullgraph=True, **options)
    assert 0 < counter.frame_count <= most
    torch._dynamo.reset()
