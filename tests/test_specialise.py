"""specialise() cuts a source down, and what is left computes the same."""

import inspect
import re
from types import ModuleType

import pytest
import torch

from fastweights import feature_maps, ops
from fastweights.kernels import linear
from fastweights.reference import (
    chunkwise,
    chunkwise_backward,
    parallel,
    steps,
)
from fastweights.specialise import source, specialise

B, T, H, K, V = 2, 40, 3, 8, 5


def run(module: ModuleType, *texts: str) -> dict:
    """The module's names, with the texts in the place of its functions."""
    names = dict(vars(module))
    for text in texts:
        exec(text, names)
    return names


def body(text: str) -> str:
    """What stands behind the signature."""
    return text.partition(":\n")[2] if "\n" in text else text


def inputs(width: int, gated: bool, corrects: bool):
    torch.manual_seed(0)
    q, k = torch.randn(2, B, T, H, K, dtype=torch.float64).unbind()
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(B, T, H, V, dtype=torch.float64)
    g = -torch.rand(B, T, H, width, dtype=torch.float64) if gated else None
    beta = torch.rand(B, T, H, dtype=torch.float64) if corrects else None
    S = torch.randn(B, H, K, V, dtype=torch.float64)
    return q, k, v, g, beta, S


CHUNK = ("intra", "scan", "new_values", "next_state", "chunkwise_forward")


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_stages_compute_the_same(gated, corrects):
    q, k, v, g, beta, S = inputs(1, gated, corrects)
    absent = ["g", "G", "rest"] * (not gated) + ["beta", "P"] * (not corrects)
    given = dict.fromkeys(absent)
    functions = [getattr(chunkwise, name) for name in CHUNK]
    texts = specialise(*functions, given=given, docstring=False)
    names = run(chunkwise, *texts)
    optional = {"g": g, "beta": beta}
    call = {n: x for n, x in optional.items() if x is not None}
    o, S_T, *_ = names["chunkwise_forward"](
        q, k, v, **call, scale=0.5, initial_state=S, chunk_size=16
    )
    want, want_S, *_ = chunkwise.chunkwise_forward(
        q, k, v, g, beta, scale=0.5, initial_state=S, chunk_size=16
    )
    assert torch.equal(o, want)
    assert torch.equal(S_T, want_S)
    code = "\n".join(map(body, texts))
    assert ("exp" in code or "decayed(" in code) == gated
    assert ("beta" in code) == corrects


def test_the_scan_without_gates_is_what_chapter_3_derives():
    given = dict.fromkeys(["g", "beta", "G", "P"])
    [text] = specialise(chunkwise.scan, given=given, docstring=False)
    assert text == (
        "def scan(\n"
        "    q: Chunks,\n"
        "    k: Chunks,\n"
        "    v: Chunks,\n"
        "    Aqk: Square,\n"
        "    S: State,\n"
        "    *,\n"
        "    scale: float,\n"
        ") -> tuple[Chunks, State]:\n"
        "    outputs = []\n"
        "    for q_n, k_n, v_n, Aqk_n in each_chunk(q, k, v, Aqk):\n"
        "        o = q_n @ S + Aqk_n @ v_n\n"
        "        outputs.append(scale * o)\n"
        "        S = next_state(k_n, v_n, None, None, S)\n"
        "    return torch.stack(outputs, dim=1), S"
    )


def test_a_call_loses_what_the_function_shown_beside_it_loses():
    given = dict.fromkeys(["g", "beta", "G", "P", "rest"])
    texts = specialise(chunkwise.scan, chunkwise.next_state, given=given)
    assert "S = next_state(k_n, v_n, S)" in texts[0]
    assert "return S + k.mT @ v_new" in texts[1]


@pytest.mark.parametrize("corrects", [False, True])
def test_the_backward_without_gates_computes_the_same(corrects):
    functions = [
        chunkwise_backward.scan_backward,
        chunkwise_backward.through_states,
        chunkwise_backward.through_scores,
        chunkwise_backward.decayed_sums,
    ]
    given = dict.fromkeys(["g", "G"])
    if not corrects:
        given |= dict.fromkeys(["beta", "P", "dM"])
    texts = specialise(*functions, given=given)
    names = run(chunkwise_backward, *texts)
    q, k, v, _, beta, S = inputs(1, False, corrects)
    q, k, v = (chunkwise.to_chunks(x, 16) for x in (q, k, v))
    if corrects:
        beta = chunkwise.to_chunks(beta[..., None], 16)
    _, Aqk, P = chunkwise.intra(q, k, None, beta)
    states, v_new = chunkwise_backward.chunk_states(
        k, v, None, beta, None, P, S
    )
    do, dS = torch.randn_like(v), torch.randn_like(S)
    P_beta = {"beta": beta, "P": P} if corrects else {}
    got = names["scan_backward"](q=q, k=k, Aqk=Aqk, do=do, dS=dS, **P_beta)
    want = chunkwise_backward.scan_backward(
        q, k, None, beta, None, Aqk, P, do, dS
    )
    y, leaving, _ = want
    only_beta = {"beta": beta} if corrects else {}
    rest = {"do": do, "v_new": v_new, "y": y, "states": states}
    got += names["through_states"](
        q=q, k=k, v=v, leaving=leaving, **only_beta, **rest
    )
    want += chunkwise_backward.through_states(
        q, k, v, None, beta, None, leaving=leaving, **rest
    )
    dM = {"dM": want[-1]} if corrects else {}
    got += names["through_scores"](q=q, k=k, dAqk=Aqk, **only_beta, **dM)
    want += chunkwise_backward.through_scores(
        q, k, beta, None, Aqk, dM.get("dM")
    )
    for a, b in zip(got, want, strict=True):
        assert b is a is None or torch.equal(a, b)
    assert "G" not in names["scan_backward"].__code__.co_varnames


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_attention_with_constants(scale, causal):
    given = {"scale": scale, "causal": causal}
    functions = (
        parallel.softmax_attention,
        parallel.softmax_attention_online,
    )
    texts = specialise(*functions, given=given)
    q, k, v, *_ = inputs(1, False, False)
    for function, text in zip(functions, texts, strict=True):
        cut = run(parallel, text)[function.__name__]
        assert torch.equal(cut(q, k, v), function(q, k, v, **given))
        assert {"scale", "causal"}.isdisjoint(
            inspect.signature(cut).parameters
        )
        code = text.split('"""')[2]
        assert ("mask" in code) == causal
        assert bool(re.search(r"\bscale\b", code)) == (scale is None)


MODULES = (chunkwise, chunkwise_backward, parallel, steps, ops)
OPTIONAL = [
    pytest.param(function, name, id=f"{function.__name__}-{name}")
    for module in MODULES
    for function in vars(module).values()
    if inspect.isfunction(function) and function.__module__ == module.__name__
    for name, parameter in inspect.signature(function).parameters.items()
    if "None" in str(parameter.annotation)
    and parameter.kind is not parameter.VAR_POSITIONAL
]


@pytest.mark.parametrize(("function", "name"), OPTIONAL)
def test_every_function_can_lose_each_optional_parameter(function, name):
    """Lines are dropped, dedented or joined, or lose words: none is new."""
    [text] = specialise(function, given={name: None})
    compile(text, name, "exec")
    whole = source(function)
    words = set(re.findall(r"\w+", whole))
    assert set(re.findall(r"\w+", text)) <= words | {"None"}
    for line in text.splitlines():
        assert line.partition("#")[2] in whole


def test_nothing_given_leaves_the_source_as_it_is():
    for function in (chunkwise.scan, ops.linear_recurrence):
        assert specialise(function) == [source(function)]


def branches(x, g=None, flag=True, name="a"):
    """Says what x is.

    In more words.
    """
    # About the first test.
    if g is not None:
        x = x * g
    # What stays, whatever g is.
    elif x > 100:
        x = 100
    else:
        x = x + 1  # beside it
    total = x + 1 if g is None or not flag else x + g  # a comment in between
    if flag:
        # Above the branch that stays.
        if g is None:
            x = 2 * total
    else:
        x = 3
    text = """
    not dedented
"""
    return x * (1 if g is None else g), text, name


CASES = [
    {"g": None},
    {"g": 2},
    {"flag": True},
    {"flag": False},
    {"g": None, "flag": True},
    {"g": 2, "flag": False},
    {"g": None, "name": "b"},
]


@pytest.mark.parametrize("given", CASES, ids=str)
@pytest.mark.parametrize("docstring", [True, False, "summary"])
def test_branches(given, docstring):
    [text] = specialise(branches, given=given, docstring=docstring)
    names = {}
    exec(text, names)
    for x in (1, 1000):
        assert names["branches"](x) == branches(x, **given)
    assert "    not dedented" in text
    assert ("In more words." in text) == (docstring is True)
    assert ("Says what" in text) == (docstring is not False)


def test_comments_stay_with_what_stays():
    [text] = specialise(branches, given={"g": None, "flag": True})
    assert "        x = x + 1  # beside it" in text
    assert "\n    # Above the branch that stays.\n    x = 2 * total" in text
    assert "g" not in text.replace("flag", "").partition(":")[0]


def checked(x, y=None):
    """Adds."""
    need = "a number"
    if isinstance(x, str):
        kind = type(x).__name__
        raise TypeError(f"got {kind}, need {need}")
    for name in ("x", "y"):
        if name == "z":
            raise ValueError(name)
    if y is None:
        return x
    elif y < 0:
        raise ValueError("negative")
    return x + y


def test_lines_that_check_arguments_are_left_out():
    [text] = specialise(checked, checks=False)
    assert text == (
        "def checked(x, y=None):\n"
        '    """Adds."""\n'
        "    if y is None:\n"
        "        return x\n"
        "    elif y < 0:\n"
        '        raise ValueError("negative")\n'
        "    return x + y"
    )
    [text] = specialise(ops.linear_recurrence, checks=False, docstring=False)
    assert "check" not in text and '"""' not in text
    assert "q, k, v = autocast(q, k, v)" in text
    [text] = specialise(feature_maps.RandomFeatures, checks=False)
    assert "raise" not in text and "wrong" not in text
    assert "super().__init__()" in text


def test_a_kernel_is_cut_as_its_function_is():
    given = {"initial_state": None}
    [text] = specialise(linear.linear_scan_kernel, given=given)
    assert text.startswith('@triton.jit(do_not_specialize=["T"])\n')
    assert "initial_state" not in text
    assert "    b_S = tl.zeros([BK, BV], dtype=tl.float32)\n" in text


@pytest.mark.parametrize(
    ("objects", "options", "message"),
    [
        ([chunkwise.scan], {"given": {"gate": None}}, "got 'gate'"),
        ([chunkwise.scan], {"given": {"rest": None}}, "got 'rest'"),
        ([chunkwise.scan], {"docstring": "first"}, "docstring: got 'first'"),
        (
            [chunkwise.decayed_scores, chunkwise.intra],
            {"given": {"G": None}},
            "G is lost, but intra gives decayed_scores it",
        ),
    ],
)
def test_errors_name_what_was_asked_for(objects, options, message):
    with pytest.raises(ValueError, match=message):
        specialise(*objects, **options)


def test_a_given_value_must_be_a_constant():
    with pytest.raises(TypeError, match=r"g.*Tensor.*is no constant"):
        specialise(chunkwise.scan, given={"g": torch.zeros(1)})
