"""What holds for every operator: refusals, modes, a graph for all lengths."""

import itertools

import pytest
import torch
from support.operator_cases import (
    EACH_OPERATOR,
    OPERATORS,
    OpChecks,
    check_one_graph,
    operator_inputs,
    operator_results,
)
from support.pairwise import all_but


@EACH_OPERATOR
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_each_tensor_is_checked(name):
    """What it is, its layout, dtype and device, by the argument's name."""
    call, x = OPERATORS[name].call, operator_inputs(name, 6, 1, torch.float32)
    call(**x)
    first, nested = next(iter(x)), torch.nested.nested_tensor
    for key, t in x.items():
        wrong = {
            "got list, need a": [1.0],
            "got float, need a": 1.0,
            r"got layout torch\.sparse_coo, need torch": t.to_sparse(),
            r"got torch\.int64, need ": t.long(),
        }
        if t.dim() > 1:
            wrong["got a nested tensor, need a dense one"] = nested([t[0]])
            jagged = nested([t[0]], layout=torch.jagged)
            wrong["got a nested tensor, need a dense"] = jagged
        if key != first:
            wrong[f"got device meta, need {first}'s, cpu"] = t.to("meta")
        for said, value in wrong.items():
            kind = ValueError if "device" in said else TypeError
            with pytest.raises(kind, match=f"^{key}: {said}"):
                call(**x | {key: value})


@EACH_OPERATOR
@pytest.mark.parametrize(
    "wrong, said",
    [
        ([0, 6], "list, need a Tensor"),
        (torch.tensor([0.0, 6.0]), "torch.float32, need torch.int32 or"),
        (torch.tensor([[0, 6]]), r"shape \[1, 2\], need \[. \+ 1\] with"),
        (torch.tensor([6]), r"shape \[1\], need \[. \+ 1\] with"),
        (torch.tensor([0, 7]), r"\[0, 7\], need values that start at 0"),
        (torch.tensor([1, 6]), r"\[1, 6\], need values that start at 0"),
        (torch.tensor([-3, 6]), r"\[-3, 6\], need values that start at 0"),
        (torch.tensor([0, 4, 3]), r"\[0, 4, 3\], need values that start"),
    ],
    ids=str,
)
def test_offsets_are_checked(name, wrong, said):
    x = operator_inputs(name, 6, 2 if len(wrong) == 3 else 1, torch.float32)
    with pytest.raises(
        (TypeError, ValueError), match=f"cu_seqlens: got {said}"
    ):
        OPERATORS[name].call(**x, cu_seqlens=wrong)


@EACH_OPERATOR
def test_a_gradient_of_its_gradient_is_refused(name):
    x = operator_inputs(name, 6, 1, torch.float32)
    x = {key: t.requires_grad_() for key, t in x.items()}
    o, first = OPERATORS[name].call(**x)[0], next(iter(x.values()))
    (slope,) = torch.autograd.grad(o.sum(), first, create_graph=True)
    with pytest.raises(NotImplementedError, match="got a gradient of its gra"):
        slope.sum().backward()


@EACH_OPERATOR
@pytest.mark.parametrize("cut", [1, 37, 64])
def test_two_calls_are_one(name, cut):
    """The state carries all that the second one needs."""
    operator, T = OPERATORS[name], 100
    once = (*operator.whole, "initial_state")
    x = operator_inputs(name, T, 1, torch.float64)
    *want, last = operator.call(**x)
    outputs = []
    for tokens in (slice(0, cut), slice(cut, T)):
        part = {
            key: t if key in once else t[:, tokens] for key, t in x.items()
        }
        *found, x["initial_state"] = operator.call(**part)
        outputs.append(found)
    whole = [torch.cat(o, 1) for o in zip(*outputs, strict=True)]
    torch.testing.assert_close((whole, x["initial_state"]), (want, last))


@EACH_OPERATOR
def test_autocast_narrows_the_operands_of_products(name):
    operator, x = OPERATORS[name], operator_inputs(name, 20, 1, torch.float32)
    by_hand = {
        key: t.bfloat16() if key in operator.narrowed else t
        for key, t in x.items()
    }
    want = operator.call(**by_hand)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = operator.call(**x)
    torch.testing.assert_close(found, want, rtol=0, atol=0)


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vjp": torch.func.vjp,
}


@pytest.mark.parametrize("name", [x for x in OPERATORS if x != "mesa"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(name, transform):
    x = operator_inputs(name, 6, 1, torch.float32)
    key = next(iter(x))

    def call(t):
        return OPERATORS[name].call(**x | {key: t})[0]

    with pytest.raises(NotImplementedError, match="got a transform of torch"):
        TRANSFORMS[transform](call, x[key])


MADE_OF_OTHERS = ("mlstm", "normalised", "mesa")


@pytest.mark.parametrize(
    "name", [x for x in OPERATORS if x not in MADE_OF_OTHERS]
)
def test_what_inference_mode_has_made_goes_on_without_gradients(name):
    x = operator_inputs(name, 6, 1, torch.float32)
    want = OPERATORS[name].call(**x)
    for key in {*x} - {"dt", "dt_bias", "z"}:  # of which a step is made
        with torch.inference_mode():
            made = x | {key: x[key].clone()}
        for a, b in zip(OPERATORS[name].call(**made), want, strict=True):
            assert torch.equal(a, b)
        other = next(k for k in x if k != key)
        made[other] = made[other].clone().requires_grad_()
        said = rf"^{key}: got a tensor made in torch\.inference_mode, need its"
        with pytest.raises(ValueError, match=said):
            OPERATORS[name].call(**made)


@EACH_OPERATOR
@pytest.mark.parametrize("offsets", [None, [0, 6]])
def test_inputs_are_left_as_they_were(name, offsets):
    x = operator_inputs(name, 6, 1, torch.float64)
    before = {key: t.clone() for key, t in x.items()}
    given = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    *_, states = OPERATORS[name].call(**x, **given)
    for state in states if isinstance(states, tuple) else [states]:
        state.zero_()
    assert all(t.equal(before[key]) for key, t in x.items())


@EACH_OPERATOR
@pytest.mark.parametrize("packed", [False, True])
def test_tensors_without_data(name, packed):
    """Shapes and dtypes, forward and backward, as with numbers."""
    x, given = (
        operator_inputs(name, 20, 2 if packed else 1, torch.bfloat16),
        {},
    )
    if packed:
        given = {"cu_seqlens": torch.tensor([0, 9, 20])}
    want = operator_results(OPERATORS[name].call, x, **given)
    away = {key: t.to("meta") for key, t in (x | given).items()}
    given = {"cu_seqlens": away.pop("cu_seqlens")} if packed else {}
    found = operator_results(OPERATORS[name].call, away, **given)
    for a, b in zip(
        (*found[0], *found[1], *found[2].values()),
        (*want[0], *want[1], *want[2].values()),
        strict=True,
    ):
        assert a.is_meta and (a.shape, a.dtype) == (b.shape, b.dtype)


SELDOM = ("normalised", "short_convolution", "mesa")
EACH_TIME = [(x, False) for x in OPERATORS if x not in SELDOM]
EACH_TIME += [(x, True) for x in ("kda", "convolve_heads", "selective_scan")]


@pytest.mark.parametrize(
    "name, packed",
    all_but(EACH_TIME, itertools.product(OPERATORS, (False, True))),
)
def test_one_graph_for_every_length_and_packing(name, packed):
    cases = (37, [5]), (65, [0, 30]), (100, [1, 2, 90])
    check_one_graph(name, packed, cases)


@EACH_OPERATOR
@pytest.mark.parametrize("packed", [False, True])
def test_schemas_and_shapes(name, packed):
    x, given = operator_inputs(name, 6, 2 if packed else 1, torch.float32), {}
    if packed:
        given["cu_seqlens"] = torch.tensor([0, 2, 6])
    with OpChecks():
        operator_results(OPERATORS[name].call, x, **given)
        first = next(iter(x.values())).requires_grad_()
        o = OPERATORS[name].call(**x, **given)[0]  # of one result alone
        torch.autograd.grad(o.sum(), first)
