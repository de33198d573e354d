"""The API reference of the site: every public name, documented and tried.

The pages are read as text here; test_site.py reads what is built of them.
"""

import dataclasses
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fastweights as fw
from fastweights.checks import close
from fastweights.models import LAYERS, LanguageModel, ModelConfig

ROOT = Path(fw.__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "book"), str(ROOT / "book" / "extensions")]
PAGES = sorted((ROOT / "chapters" / "api").glob("*.rst"))

pytest.importorskip("sphinx")
from api_entries import as_rst, found  # noqa: E402

ENTRY = re.compile(
    r"^\.\. (automodule|entries):: (\S+)\n((?:\n|   .*\n)*)", re.M
)


def blocks() -> list[tuple[str, str, list[str]]]:
    """What the pages name: the directive, the module, the names under it."""
    return [
        (kind, module, [line.split()[0] for line in body.split("\n") if line])
        for page in PAGES
        for kind, module, body in ENTRY.findall(page.read_text("utf-8"))
    ]


MODULES = [module for kind, module, _ in blocks() if kind == "automodule"]
NAMES = [
    f"{module}.{name}"
    for kind, module, names in blocks()
    for name in names
    if kind == "entries"
]
# Of steps, each is its equation, and shapes stand in the signature.
DESCRIBED = [x for x in NAMES if not x.startswith("fastweights.reference.")]


def test_a_public_name_has_one_entry() -> None:
    src = Path(fw.__file__).parents[1]
    public = {
        ".".join(file.relative_to(src).with_suffix("").parts)
        for file in (src / "fastweights").rglob("*.py")
        if re.search("^__all__", file.read_text("utf-8"), re.M)
    }
    assert {x.removesuffix(".__init__") for x in public} <= {*MODULES}
    entries = Counter(id(found(name)) for name in NAMES)
    assert set(entries.values()) == {1}
    for module in map(importlib.import_module, MODULES):
        for name in getattr(module, "__all__", []):
            x = getattr(module, name)
            known = id(x) in entries or getattr(x, "__name__", "") in MODULES
            assert known, f"{module.__name__}.{name} has no entry"


def parts(text: str) -> dict[str, str]:
    """The fields of a docstring, by name."""
    found = re.split(r"^(Args|Returns|Raises|Yields):\n", text, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.parametrize("name", DESCRIBED)
def test_an_entry_says_what_goes_in_and_out(name: str) -> None:
    x = found(name)
    if not callable(x) or dataclasses.is_dataclass(x):  # its fields say it
        return
    said, signature = parts(inspect.getdoc(x)), inspect.signature(x)
    heads = re.findall(r"^ {4}(\S[^:]*):", said.get("Args", ""), re.M)
    described = {x.strip() for head in heads for x in head.split(",")}
    placed = {"device", "dtype"} if inspect.isclass(x) else set()
    taken = {
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD,)
    }
    assert taken - placed <= described | {"args"}
    assert described <= taken
    if not inspect.isfunction(x):
        return
    code = inspect.getsource(x).split('"""')[-1]
    returned = str(signature.return_annotation)
    if re.search("Iterator|ContextManager", returned):
        return
    assert ("Returns" in said) == (returned not in ("None", "")), returned
    if re.search(r"\b(raise|check_\w+\(|refuse_shape)", code):
        assert "Raises" in said


def examples() -> Iterator[tuple[str, str]]:
    """Whose docstrings have blocks of Python, and the blocks."""
    for name in dict.fromkeys([*MODULES, *NAMES]):
        text = "\n".join(as_rst(inspect.getdoc(found(name)) or ""))
        for block in text.split(".. code-block:: python\n")[1:]:
            yield name, dedent(re.match(r"((?: .*)?\n?)*", block)[0])


def given(name: str) -> dict[str, object]:
    """What an example takes for granted: tensors, a model, the library."""
    B, T, H, K = 1, 12, 2, 16
    q, k, v = torch.randn(3, B, T, H, K)
    i, beta, rate, momentum = torch.rand(4, B, T, H)
    logits, rates = torch.randn(B, T, H), torch.rand(B, T, H, 3)
    by_channel = ("gla", "kda", "gated_deltanet2")
    shapes = {"retention": (H,)} | dict.fromkeys(by_channel, (B, T, H, K))
    g = -torch.rand(shapes.get(name.rpartition(".")[2], (B, T, H)))
    b, w, p = torch.rand(3, B, T, H, K)
    S, ridge = torch.zeros(B, H, K, K), torch.ones(H, K)
    state, (w0, w1, w2) = S.clone(), torch.randn(3, H, K, K)
    start = [(w0, torch.zeros(H, K))]
    norm, step_scale = (torch.ones(H, K), torch.zeros(H, K)), torch.ones(4)
    x, dt = torch.randn(B, T, 1024), torch.rand(B, T, 1024)
    A, *maps = -torch.ones(1024, K), *torch.randn(2, B, T, K)
    more, packed, offsets = x, x, torch.tensor([0, 5, T])
    tokens = torch.randint(257, (B, T))
    prompt = tokens[0]
    sizes = {"vocab_size": 257, "dim": 16, "num_layers": 1, "num_heads": 2}
    model = LanguageModel(ModelConfig(**sizes))
    library = {"torch": torch, "fw": fw, "close": close}
    return locals() | dict(zip("BC", maps, strict=True)) | library


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A process by itself."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name, code", list(examples()))
def test_an_example_runs(name, code, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    x = found(name)
    module = x if inspect.ismodule(x) else sys.modules[x.__module__]
    names = vars(module) | given(name)
    if "mesh" in code:
        names["mesh"] = request.getfixturevalue("mesh")
    exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_an_example(page):
    if page.stem in ("capabilities", "compat"):  # tables; others' functions
        return
    text = page.read_text("utf-8")
    assert any(name in text for name, _ in examples())


def test_what_the_page_of_capabilities_says_in_words():
    """Of all kernels, and of every layer."""
    kernels = Path(fw.__file__).parent / "kernels"
    for file in kernels.rglob("*.py"):
        assert "atomic_" not in file.read_text("utf-8"), file
    for layer in LAYERS.values():
        assert "cu_seqlens" in inspect.signature(layer.forward).parameters
