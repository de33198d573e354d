"""Tokens drawn with noise that seeds tell."""

import math

import pytest
import torch

from fastweights.models.sampling import Sampling, exponential_noise

P = torch.tensor([0.1, 0.5, 0.3, 0.1])


def sampling(N, temperature=1.0, top_p=1.0, first=0, **flags):
    return Sampling(
        torch.full((N,), temperature, dtype=torch.float64),
        torch.full((N,), top_p),
        torch.arange(first, first + N),
        torch.zeros(N, dtype=torch.int64),
        **flags,
    )


def draw(options, logits):
    return options.draw(logits, *logits.max(-1))


@pytest.mark.parametrize("whole", [False, True])
def test_noise_is_exponential_and_independent(whole):
    """Moments of 4 million numbers, within four standard deviations."""
    seed = torch.randint(2**62, (4,), generator=torch.manual_seed(0))
    seed = torch.arange(4) if whole else seed
    e = torch.stack(
        [exponential_noise(seed, torch.full((4,), i), 2**18) for i in range(4)]
    ).flatten(0, 1)
    error = 4 / math.sqrt(e.numel())
    assert abs(e.mean() - 1) < error
    assert abs(e.var() - 1) < error * math.sqrt(8)
    assert e.min() > 0
    few = (e < 2**-16).double().mean() * 2**16  # the ones that decide
    assert abs(few - 1) < 4 * 2**8 / math.sqrt(e.numel())
    z = e - 1
    for other in (z.roll(1, 0), z.roll(1, 1), z.roll(128, 1)):
        assert abs((z * other).mean()) < error


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, P), (0.75, [0, 0.625, 0.375, 0]), (0.5, [0, 1, 0, 0])],
)
def test_shares_of_draws(top_p, kept):
    N = 40_000
    options = sampling(N, top_p=top_p, whole_distribution=top_p == 1)
    share = draw(options, P.log().expand(N, 4)).bincount(minlength=4) / N
    kept = torch.as_tensor(kept).float()
    error = 4 * 0.5 / math.sqrt(N)
    torch.testing.assert_close(share, kept, rtol=0, atol=error)


def test_a_row_draws_the_same_in_any_company():
    logits = torch.randn(5, 300, generator=torch.manual_seed(0))
    together = sampling(5)
    alone = [sampling(1, first=i) for i in range(5)]
    steps = []
    for _ in range(6):
        steps.append(draw(together, logits))
        one = [draw(x, y[None]) for x, y in zip(alone, logits, strict=True)]
        assert torch.cat(one).equal(steps[-1])
    assert len({tuple(x.tolist()) for x in steps}) == 6
    assert together.num_drawn.tolist() == 5 * [6]


def test_rows_have_temperatures_and_top_ps_of_their_own():
    logits = P.log().expand(300, 4)
    options = sampling(300)
    options.temperature[::3], options.top_p[1::3] = 0, 0.4
    found = draw(options, logits)
    assert (found[::3] == 1).all() and (found[1::3] == 1).all()
    assert set(found[2::3].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 1e-300])
def test_a_temperature_next_to_none_takes_the_likeliest(temperature):
    logits = torch.tensor([[5.0, 4.999, -math.inf], [-8e4, 3e38, 3e38]])
    options = sampling(2, temperature)
    found = {tuple(draw(options, logits).tolist()) for _ in range(40)}
    assert found == {(0, 1), (0, 2)}
