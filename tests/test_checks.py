"""What chapters check with: errors, verdicts and the log of attempts."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from fastweights import checks


def test_relative_error_is_of_root_mean_squares():
    ref = torch.tensor([3.0, -4.0])
    x = ref + torch.tensor([0.3, 0.4])
    assert checks.relative_error(x, ref) == pytest.approx(0.1)
    assert checks.relative_error(ref, ref) == 0
    assert checks.relative_error(3 * ref, ref) == pytest.approx(2)


def test_relative_error_of_a_zero_reference_is_absolute():
    x = torch.tensor([0.3, -0.3])
    assert checks.relative_error(x, torch.zeros(2)) == pytest.approx(0.3)


@pytest.mark.parametrize("place", ["x", "ref"])
def test_relative_error_of_nan_passes_no_tolerance(place):
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    pair = (bad, good) if place == "x" else (good, bad)
    assert math.isnan(checks.relative_error(*pair))
    with pytest.raises(AssertionError):
        checks.close(*pair, tol=math.inf)


def test_relative_error_refuses_shapes_that_would_broadcast():
    with pytest.raises(ValueError, match=r"x: got shape \(2, 1\), need that"):
        checks.relative_error(torch.ones(2, 1), torch.ones(2))


def test_relative_error_compares_dtypes_and_graphs():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert checks.relative_error(x, torch.ones(2).double()) == 0


def test_close_prints_what_it_found(capsys):
    checks.close(torch.ones(2), torch.ones(2), 1e-6, "the claim")
    printed = capsys.readouterr().out
    assert printed == "the claim: relative error 0.0e+00, allowed 1e-06\n"


def test_close_in_a_notebook_prints_a_line_for_each_tolerance(capsys):
    shell = InteractiveShell.instance()
    try:
        shell.run_cell(
            "import torch\n"
            "from fastweights.checks import close\n"
            "one = torch.ones(1)\n"
            "close(one + 0.1, one, 0.2, 'a')\n"
            "close(one, one, 0.2, 'b')\n"
            "close(one, one, 1e-6, 'alone')\n"
            "print('between')\n"
            "for i in range(30):\n"
            "    close(one, one, 0.5, f'number {i}')\n"
        )
        cell = capsys.readouterr().out.splitlines()
        shell.run_cell("close(one, one, 1e-3)")
        after = capsys.readouterr().out.splitlines()
        failed = shell.run_cell("close(one, one, 1e-3); close(one, 2*one, 0)")
        capsys.readouterr()
        shell.run_cell("close(one, one, 1e-4)")
        last = capsys.readouterr().out.splitlines()
    finally:
        InteractiveShell.clear_instance()
    assert cell == [
        "between",
        "a; b: relative errors up to 1.0e-01, allowed 2e-01",
        "alone: relative error 0.0e+00, allowed 1e-06",
        "30 comparisons: relative errors up to 0.0e+00, allowed 5e-01",
    ]
    assert after == ["relative error 0.0e+00, allowed 1e-03"]
    assert isinstance(failed.error_in_exec, AssertionError)
    assert last == ["relative error 0.0e+00, allowed 1e-04"]


def test_close_fails_above_its_tolerance(capsys):
    x, ref = torch.tensor([1.1]), torch.tensor([1.0])
    checks.close(x, ref, 0.11)
    with pytest.raises(AssertionError, match=r"1\.0e-01, allowed 9e-02"):
        checks.close(x, ref, 0.09)
    code = "from fastweights.checks import *; import torch; x = torch.ones(3)"
    command = [sys.executable, "-O", "-c", f"{code}; close(0 * x, x, 1e-3)"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode and "AssertionError: relative error" in run.stderr


def test_raises_shows_the_error(capsys):
    checks.raises(ZeroDivisionError, lambda a: a / 0, 1)
    assert capsys.readouterr().out == "ZeroDivisionError: division by zero\n"


def test_raises_fails_without_the_error():
    with pytest.raises(AssertionError, match="no ValueError was raised"):
        checks.raises(ValueError, lambda: None)
    with pytest.raises(ZeroDivisionError):
        checks.raises(ValueError, lambda: 1 / 0)


@checks.exercise
def check_double(candidate):
    """The candidate doubles its argument."""
    1 + candidate(1)
    assert candidate(2) == 4, "2 gave something else"
    if candidate(3) != 6:
        raise AssertionError  # without pytest's explanation


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(checks, "exercise_log", [])
    monkeypatch.delenv("FASTWEIGHTS_STRICT", raising=False)


def right(x):
    return 2 * x


def wrong(x):
    return x**2


def wrong_at_once(x):
    return x


def broken(x):
    return x.shape


def nothing(x):
    return None


def returns_stub(x):
    return ...


def assigns_stub(x):
    y = ...
    return 2 * y


def unwritten(x):
    raise NotImplementedError


def unsupported(x):
    raise NotImplementedError("no rule for vjp")


VERDICTS = {
    "right": (right, "passed: double"),
    "wrong": (wrong, "not yet: the answer differs from the reference"),
    "wrong-with-a-hint": (wrong_at_once, "not yet: 2 gave something else"),
    "broken": (
        broken,
        "not yet: AttributeError: 'int' object has no attribute 'shape', "
        "in broken: return x.shape\n",
    ),
    "nothing": (
        nothing,
        "not yet: TypeError: unsupported operand type(s) for +: 'int' and "
        "'NoneType', where the check uses nothing: 1 + candidate(1)\n",
    ),
    "returns-stub": (returns_stub, "not yet: the stub still has its ..."),
    "assigns-stub": (assigns_stub, "not yet: the stub still has its ..."),
    "ellipsis": (..., "not yet: the stub still has its ..."),
    "unwritten": (unwritten, "not yet: not written"),
    "unsupported": (unsupported, "not yet: NotImplementedError: no rule"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_exercise_tells_its_verdict_and_logs_it(case, capsys):
    candidate, verdict = VERDICTS[case]
    check_double(candidate)
    assert capsys.readouterr().out.startswith(verdict)
    [attempt] = checks.exercise_log
    assert attempt.name == "double"
    assert attempt.passed == (case == "right")
    assert attempt.candidate is candidate
    assert attempt.check is check_double


@pytest.mark.parametrize("case", VERDICTS)
def test_exercise_raises_when_asked_to(case, monkeypatch):
    candidate, _ = VERDICTS[case]
    if case == "right":
        check_double.run(candidate)
        return
    with pytest.raises(Exception):  # noqa: B017 (whatever the check met)
        check_double.run(candidate)
    monkeypatch.setenv("FASTWEIGHTS_STRICT", "1")
    with pytest.raises(Exception):  # noqa: B017
        check_double(candidate)
    assert [attempt.passed for attempt in checks.exercise_log] == [False]


def test_exercise_keeps_its_functions_name_and_text():
    assert check_double.__name__ == "check_double"
    assert check_double.__doc__ == "The candidate doubles its argument."


def test_an_ellipsis_in_an_index_is_no_stub(capsys):
    def candidate(x):
        return torch.tensor([x])[..., 0] + 1

    check_double(candidate)
    assert "the stub still" not in capsys.readouterr().out


def test_footprint_counts_what_operations_touch():
    x = torch.ones(3, 4)
    with checks.Footprint() as footprint:
        y = x @ x.T
        y.sum()
    # x, x transposed (a view, which is an operation too), y; and its sum
    assert footprint.largest == 12
    assert footprint.calls == 3
    assert footprint.total == (12 + 12) + (12 + 12 + 9) + (9 + 1)


def test_footprint_finds_what_is_alive_at_once():
    x = torch.ones(10)
    with checks.Footprint() as one_at_a_time:
        for _ in range(5):
            y = 2 * x
            del y
    assert one_at_a_time.peak == 10
    with checks.Footprint() as all_kept:
        kept = [(2 * x)[:1] for _ in range(5)]  # views keep all of it
        x[:5].add_(1)  # what was there before is not counted
    assert all_kept.peak == 50 and len(kept) == 5
    assert all_kept.names == {"mul", "slice", "add_"}
    assert all_kept.dtypes == {torch.float32}
    with checks.Footprint() as wider:
        x.double().float()
    assert wider.dtypes == {torch.float32, torch.float64}


def test_exponentials_are_counted():
    with checks.Exponentials() as none:
        torch.ones(3) + 1
    assert none.count == 0 and none.largest == -math.inf
    with checks.Exponentials() as found:
        torch.tensor([1.0, -2.0]).exp()
        torch.expm1(torch.tensor(0.5))
        torch.exp2(torch.full((2, 3), -7.0))
        torch.ones(0).exp()
    assert found.count == 9 and found.largest == 1
    for name in ("exp_", "exp2_", "expm1_"):
        with checks.Exponentials() as found:
            getattr(torch.full((4,), 2.0), name)()
        assert found.count == 4 and found.largest == pytest.approx(2)
    with checks.Exponentials() as others:
        torch.pow(math.e, torch.ones(2)) * torch.ones(2).exp()
        torch.ones(2).sigmoid_() + torch.logaddexp(*torch.ones(2, 2))
    assert others.imitated == {"pow", "sigmoid_", "logaddexp"}
    assert others.count == 2 and not found.imitated


def dual(x):
    with torch.autograd.forward_ad.dual_level():
        y = torch.autograd.forward_ad.make_dual(x, x).square()
        return torch.autograd.forward_ad.unpack_dual(y).tangent


@pytest.mark.parametrize(
    "way",
    [
        lambda x: torch.autograd.grad(x.requires_grad_().square().sum(), x),
        lambda x: x.requires_grad_().square().sum().backward(),
        torch.func.grad(lambda x: x.square().sum()),
        lambda x: torch.autograd.functional.jacobian(torch.square, x),
        lambda x: torch.func.jvp(torch.square, (x,), (x,)),
        torch.func.jacfwd(torch.square),
        dual,
    ],
    ids=["grad", "backward", "func", "functional", "jvp", "jacfwd", "dual"],
)
def test_no_autograd_refuses_every_way_to_a_gradient(way):
    x = torch.ones(3)
    with (
        pytest.raises(AssertionError, match="write the gradients as formulas"),
        checks.no_autograd(),
        torch.enable_grad(),
    ):
        way(x)
    x = torch.ones(3)
    way(x)  # and it is allowed again


def test_what_is_watched_first_may_be_without_autograd():
    """In a process of its own: the watch imports what PyTorch needs once."""
    script = """
import torch
from fastweights.checks import Footprint, no_autograd
with no_autograd(), Footprint() as seen:
    torch.ones(3) * 2
print(seen.names)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "mul" in done.stdout, done.stderr


def test_conversion_is_forbidden():
    x = torch.ones(3)
    for way in (
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        np.asarray,
        np.from_dlpack,
    ):
        with (
            pytest.raises(AssertionError, match="tensors leave PyTorch"),
            checks.forbid_conversion(),
        ):
            way(x)
        way(x)  # and it is allowed again


def test_the_library_is_forbidden():
    borrowed = checks.count_events
    with (
        pytest.raises(AssertionError, match="the library did it"),
        checks.forbid(checks.relative_error, checks.count_events),
    ):
        borrowed(len, [])
    assert borrowed(len, []) == 0  # and it is allowed again
    assert checks.relative_error(torch.ones(1), torch.ones(1)) == 0


def test_events_of_a_call():
    def doubled(n):
        total = 0
        for _ in range(n):
            total += 2
        return total

    few, many = (checks.count_events(doubled, n) for n in (1, 101))
    assert few < 10 and many - few == 200


def test_products_are_listed_with_their_sizes():
    a, b = torch.ones(5, 3), torch.ones(3, 2)
    with checks.Products() as products:
        a @ b
        torch.einsum("xij,xjk->xik", a.expand(4, 5, 3), b.expand(4, 3, 2))
        torch.addmm(torch.ones(5, 2), a, b)
        a @ b[:, 0]
        (a * a).sum()
    assert products.sizes == [(5, 2, 3)] * 3 + [(5, 1, 3)]
    assert products.calls > 4 and "bmm" in products.names
