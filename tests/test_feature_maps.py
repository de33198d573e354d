"""Feature maps: their formulas, and that the random ones are unbiased."""

import ast
import inspect
import math

import pytest
import torch

import fastweights as fw
from fastweights import feature_maps

K = 6


def pair(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, K, generator=generator, dtype=torch.float64)
    return 0.6 * x / x.norm(dim=-1, keepdim=True)


def estimates(map_class, *, orthogonal, num_features, draws, q, k):
    """phi(q) . phi(k) of that many independent maps."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(draws):
        directions = feature_maps.random_directions(
            num_features,
            K,
            orthogonal=orthogonal,
            generator=generator,
            dtype=torch.float64,
        )
        phi = map_class(directions)
        values.append(phi(q) @ phi(k))
    return torch.stack(values)


MAPS = {
    "fourier": feature_maps.RandomFourier,
    "positive": feature_maps.PositiveRandom,
}


def test_plain_maps_are_their_formulas():
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
    assert feature_maps.identity(x).equal(x)
    relu = torch.tensor([0.0, 0.0, 0.0, 0.5, 2.0])
    assert feature_maps.relu(x).equal(relu)
    elu1 = [math.exp(-2), math.exp(-0.5), 1.0, 1.5, 3.0]
    torch.testing.assert_close(feature_maps.elu1(x), torch.tensor(elu1))
    total = sum(math.exp(a) for a in x.tolist())
    softmax = torch.tensor([math.exp(a) / total for a in x.tolist()])
    torch.testing.assert_close(feature_maps.softmax(x), softmax)


def test_elu1_has_the_gradient_of_its_formula():
    x = torch.tensor([-1e4, -2.0, 0.5, 1e4], requires_grad=True)
    y = feature_maps.elu1(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    want = torch.tensor([0.0, math.exp(-2), 1.0, 1.0])
    torch.testing.assert_close(grad, want)


def test_softmax_map_normalises_each_vector():
    x = torch.randn(2, 3, 4, K)
    sums = feature_maps.softmax(x).sum(-1)
    torch.testing.assert_close(sums, torch.ones(2, 3, 4))


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_random_features_have_the_exponential_for_mean(name, orthogonal):
    for seed in range(3):
        q, k = pair(seed)
        values = estimates(
            MAPS[name],
            orthogonal=orthogonal,
            num_features=8,
            draws=1500,
            q=q,
            k=k,
        )
        exact = (q @ k).exp()
        standard_error = values.std() / len(values) ** 0.5
        assert standard_error < 0.02 * exact
        assert (values.mean() - exact).abs() < 4 * standard_error


def test_errors_of_independent_features_are_as_derived():
    # Choromanski et al. 2021, lemma 2, with R directions.
    q, k = pair(4)
    R = 4
    exact = (q @ k).exp()
    near = (-(q - k).square().sum()).exp()
    far = (q + k).square().sum().exp()
    expected = {
        "fourier": far / exact**2 * (1 - near) ** 2 / (2 * R),
        "positive": far * exact**2 * (1 - 1 / far) / R,
    }
    for name, variance in expected.items():
        values = estimates(
            MAPS[name], orthogonal=False, num_features=R, draws=3000, q=q, k=k
        )
        assert (values.var() / variance - 1).abs() < 0.15, name


@pytest.mark.parametrize("num_features", [1, 4, K, 2 * K, 2 * K + 1])
def test_directions_are_orthogonal_in_blocks(num_features):
    generator = torch.Generator().manual_seed(0)
    w = feature_maps.random_directions(
        num_features, K, generator=generator, dtype=torch.float64
    )
    assert w.shape == (num_features, K)
    for block in w.split(K):
        gram = block @ block.T
        off = gram - gram.diagonal().diag()
        assert off.abs().max() < 1e-12 * gram.diagonal().max()


@pytest.mark.parametrize("orthogonal", [True, False])
def test_each_direction_is_gaussian(orthogonal):
    generator = torch.Generator().manual_seed(0)
    w = torch.stack(
        [
            feature_maps.random_directions(
                K, K, orthogonal=orthogonal, generator=generator
            )
            for _ in range(2000)
        ]
    )
    for row in range(K):
        covariance = w[:, row].T @ w[:, row] / len(w)
        # A product of two standard normals has variance 1, a square 2.
        tolerance = 5 * (2 / len(w)) ** 0.5
        assert (covariance - torch.eye(K)).abs().max() < tolerance
        assert w[:, row].mean(0).abs().max() < 5 / len(w) ** 0.5
        square = w[:, row].square().sum(-1)
        assert abs(square.var() / (2 * K) - 1) < 0.2  # chi-squared


def test_directions_follow_their_generator_and_dtype():
    draws = [
        feature_maps.random_directions(
            5,
            K,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        for seed in (1, 1, 2)
    ]
    assert draws[0].dtype == torch.float64
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("name", MAPS)
def test_random_features_have_the_shape_and_dtype_of_their_input(name, dtype):
    phi = MAPS[name](feature_maps.random_directions(5, K))
    x = torch.randn(2, 3, 4, K).to(dtype)
    y = phi(x)
    assert y.shape == (2, 3, 4, 10 if name == "fourier" else 5)
    assert y.dtype == dtype
    if name == "positive":
        assert (y > 0).all()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_random_features_in_half_precision_are_rounded_once(name, dtype):
    """An exponential has as many wrong digits as its argument is long."""
    torch.manual_seed(0)
    phi = MAPS[name](feature_maps.random_directions(5, K).to(dtype))
    x = (1.5 * torch.randn(40, K)).clamp(-2.5, 2.5).to(dtype)
    want = phi(x.double())
    assert (want.abs() < 6e4).all()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        phi(x).double(), want, rtol=eps, atol=torch.finfo(dtype).tiny
    )


def test_the_package_has_them_without_an_import_of_their_own():
    """The package's own imports bind every public name."""
    imports = ast.walk(ast.parse(inspect.getsource(fw)))
    names = [node.names for node in imports if hasattr(node, "names")]
    bound = {alias.name for aliases in names for alias in aliases}
    assert "feature_maps" in fw.__all__
    assert bound >= set(fw.__all__)


@pytest.mark.parametrize("name", MAPS)
def test_a_modules_directions_are_a_part_of_it(name):
    phi = MAPS[name](feature_maps.random_directions(5, K))
    other = MAPS[name](feature_maps.random_directions(5, K))
    model = torch.nn.Sequential(phi).double()
    assert phi.directions.dtype == torch.float64
    assert [*model.state_dict()] == ["0.directions"]
    assert not [*model.parameters()]
    other.load_state_dict(phi.state_dict())
    x = torch.randn(3, K)
    assert other(x).equal(phi(x))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, K), "num_features: got 0, need at least 1"),
        ((-2, K), "num_features: got -2, need at least 1"),
        ((2.0, K), "num_features: got float, need an int"),
        ((5, 0), "dim: got 0, need at least 1"),
        ((5, "6"), "dim: got str, need an int"),
    ],
)
@pytest.mark.parametrize("orthogonal", [True, False])
def test_sizes_of_directions_that_are_refused(sizes, orthogonal, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        feature_maps.random_directions(*sizes, orthogonal=orthogonal)


@pytest.mark.parametrize("name", MAPS)
def test_directions_and_inputs_of_other_shapes_are_refused(name):
    need = r"need \[R, K\] with R, K >= 1$"
    with pytest.raises(ValueError, match=rf"^directions: got .*\[6\], {need}"):
        MAPS[name](torch.zeros(K))
    with pytest.raises(
        TypeError, match=r"^directions: got list, need a Tenso"
    ):
        MAPS[name]([1.0])
    phi = MAPS[name](torch.zeros(5, K))
    message = r"^x: got shape \[3, 1\], need \[\.\.\., 6\], as wide as"
    with pytest.raises(ValueError, match=message):
        phi(torch.zeros(3, 1))
    with pytest.raises(TypeError, match=r"^x: got float, need a Tensor"):
        phi(1.0)
