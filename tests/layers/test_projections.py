"""Projections of one input: what each module would have said by itself."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fastweights.layers import projections
from fastweights.layers.projections import SUM, Projections, project

D, WIDTHS = 6, (9, 3, 5)


def modules(dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Linear(D, n, bias=False, dtype=dtype) for n in WIDTHS]


def tokens(dtype=torch.float64, **options):
    torch.manual_seed(1)
    return torch.randn(2, 4, D, dtype=dtype, **options).requires_grad_()


def one_by_one(x, *modules):
    return [None if m is None else m(x) for m in modules]


def outputs_and_gradients(function, x, given):
    """Outputs, then gradients of x and of every parameter in use."""
    outputs = [y for y in function(x, *given) if y is not None]
    parameters = [p for m in given if m is not None for p in m.parameters()]
    asked = [x, *(p for p in parameters if p.requires_grad)]
    loss = sum(y.sin().sum() for y in outputs)
    return *outputs, *torch.autograd.grad(loss, asked)


@pytest.fixture
def sums(monkeypatch):
    """The shapes of each sum of products that is made, in their order."""
    seen, inner = [], projections._sum

    def remembered(a, b):
        seen.append([tuple(y.shape) for y in b])
        return inner(a, b)

    monkeypatch.setattr(projections, "_sum", remembered)
    return seen


def test_as_each_module_by_itself(sums):
    """And the gradient of x is one sum, which the widest product ends."""
    x, given = tokens(), modules()
    found = outputs_and_gradients(project, x, given)
    torch.testing.assert_close(
        found, outputs_and_gradients(one_by_one, x, given)
    )
    assert sums == [[(3, D), (5, D), (9, D)]]


def test_other_modules_stand_between(sums):
    """None, a bias, two matrices: each in its place."""
    first, second, third = modules()
    low = nn.Sequential(nn.Linear(D, 2).double(), nn.Linear(2, 7).double())
    given = [first, None, nn.Linear(D, 4).double(), second, low, third]
    found = outputs_and_gradients(project, tokens(), given)
    want = outputs_and_gradients(one_by_one, tokens(), given)
    torch.testing.assert_close(found, want)
    assert [len(shapes) for shapes in sums] == [3]


def doubled(module, inputs, output):
    return 2 * output


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Around(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.parametrize("kind", ["hook", Doubled, Around])
def test_a_module_that_does_more_is_called(kind):
    x, given = tokens(), modules()
    want = [y.detach() for y in project(x, *given)]
    if kind == "hook":
        given[1].register_forward_hook(doubled)
    else:
        weight = given[1].weight
        given[1] = kind(D, 3, bias=False)
        given[1].weight = weight
    want[1] = 2 * want[1]
    torch.testing.assert_close(project(x, *given), want)


def test_what_is_not_asked_for_has_no_gradient(sums):
    """A frozen weight, an output that nobody uses, an x of no interest."""
    x, given = tokens(), modules()
    given[0].weight.requires_grad_(False)
    a, b, _ = project(x, *given)
    (a.sum() + b.sum()).backward()
    assert [m.weight.grad is None for m in given] == [True, False, True]
    assert sums == [[(3, D), (9, D)]]
    want = torch.ones(2, 4, 3).double() @ given[1].weight
    want += torch.ones(2, 4, 9).double() @ given[0].weight
    torch.testing.assert_close(x.grad, want)
    project(x.detach(), *given)[1].sum().backward()
    with torch.no_grad():
        assert not any(y.requires_grad for y in project(x, *given))
    assert len(sums) == 1


def test_under_autocast():
    """As a Linear: in half precision, the gradients in the weights' dtype.

    What is in fp64 stays in it.
    """
    x, given = tokens(torch.float32), modules(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = outputs_and_gradients(project, x, given)
        want = outputs_and_gradients(one_by_one, x, given)
        exact = project(tokens(), *modules())
    assert [t.dtype for t in found] == [t.dtype for t in want]
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
    assert {y.dtype for y in exact} == {torch.float64}


def test_a_gradient_of_the_gradient():
    weights = [m.weight for m in modules()]
    call = (Projections.apply, (tokens(), *weights))
    assert torch.autograd.gradcheck(*call, fast_mode=True)
    assert torch.autograd.gradgradcheck(*call, fast_mode=True)


def test_under_a_transform():
    x, given = tokens(), modules()

    def loss(x):
        return sum(y.sin().sum() for y in project(x, *given))

    (want,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), want)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_same_products_are_counted(frozen):
    """And none for a weight that is not trained."""

    def counted(function):
        given = modules()
        given[0].weight.requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            sum(y.sum() for y in function(tokens(), *given)).backward()
        return counter.get_total_flops()

    products = 2 * 8 * D * (3 * sum(WIDTHS) - frozen * WIDTHS[0])
    assert counted(project) == counted(one_by_one) == products


def test_the_operator_passes_opcheck():
    a = [torch.randn(5, n, requires_grad=True) for n in WIDTHS]
    b = [torch.randn(n, D, requires_grad=True) for n in WIDTHS]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(SUM, (a, b), test_utils=checks)
