"""Each step against its equation, written out element by element."""

import math

import pytest
import torch
import torch.nn.functional as F

from fastweights.reference import steps

K, V = 3, 4


def by_elements(S, q, k, v, decay, write, beta=None):
    """S'_ij = sum_m (1 - beta k k^T)_im decay_m S_mj + write k_i v_j."""
    new = [[0.0] * V for _ in range(K)]
    for i in range(K):
        for j in range(V):
            for m in range(K):
                keep = float(i == m)
                if beta is not None:
                    keep -= beta * k[i] * k[m]
                new[i][j] += keep * decay[m] * S[m][j]
            new[i][j] += write * k[i] * v[j]
    o = [sum(q[i] * new[i][j] for i in range(K)) for j in range(V)]
    return torch.tensor(new), torch.tensor(o)


def one_head(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return draw(K, V), draw(K) - 0.5, draw(K), draw(V) - 0.5


DT, A, G, BETA = 0.7, -1.3, -0.4, 0.6
PER_CHANNEL = [-0.1, -2.0, -0.5]
MEMBERS = {
    "linear": ([], [1.0] * K, 1.0, None),
    "retention": ([G], [math.exp(G)] * K, 1.0, None),
    "mamba2": ([DT, A], [math.exp(DT * A)] * K, DT, None),
    "gla": ([PER_CHANNEL], [math.exp(g) for g in PER_CHANNEL], 1.0, None),
    "deltanet": ([BETA], [1.0] * K, BETA, BETA),
    "gated_deltanet": ([G, BETA], [math.exp(G)] * K, BETA, BETA),
    "kda": (
        [PER_CHANNEL, BETA],
        [math.exp(g) for g in PER_CHANNEL],
        BETA,
        BETA,
    ),
}
ARGUMENTS = {name: arguments for name, (arguments, *_) in MEMBERS.items()}
ARGUMENTS["gated_deltanet2"] = [PER_CHANNEL, [0.9, 0.1, 0.5], [0.8, 0, 1, 0.3]]
ARGUMENTS["comba"] = [[0.4, -0.3, 0.2], G, BETA]


@pytest.fixture(autouse=True)
def double():
    """Python's floats are doubles: so are the tensors made from them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", MEMBERS)
def test_step_is_its_equation(name):
    arguments, decay, write, beta = MEMBERS[name]
    S, q, k, v = one_head(0)
    extra = [torch.tensor(a) for a in arguments]
    new, o = getattr(steps, name)(S, q, k, v, *extra)
    state = by_elements(
        *(x.tolist() for x in (S, q, k, v)), decay, write, beta
    )
    torch.testing.assert_close((new, o), state, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_step_treats_leading_dimensions_apart(name):
    arguments = [torch.tensor(a) for a in ARGUMENTS[name]]
    heads = [one_head(seed) for seed in range(6)]
    S, q, k, v = (
        torch.stack(x).unflatten(0, (2, 3)) for x in zip(*heads, strict=True)
    )
    extra = [a.expand(2, 3, *a.shape) for a in arguments]
    new, o = getattr(steps, name)(S, q, k, v, *extra)
    for i, head in enumerate(heads):
        alone = getattr(steps, name)(*head, *arguments)
        torch.testing.assert_close(
            (new[i // 3, i % 3], o[i // 3, i % 3]), alone
        )


@pytest.mark.parametrize("name", [n for n in MEMBERS if n != "mamba2"])
def test_recurrence_is_every_member(name):
    arguments = [torch.tensor(a) for a in MEMBERS[name][0]]
    head = one_head(1)
    beta = arguments[-1] if MEMBERS[name][3] is not None else None
    gates = [a for a in arguments if a is not beta]
    g = gates[0].reshape(-1) if gates else None
    torch.testing.assert_close(
        steps.recurrence(*head, g, beta),
        getattr(steps, name)(*head, *arguments),
    )


def test_gated_deltanet2_erases_and_writes_by_channel():
    S, q, k, v = one_head(5)
    g, b, w = (torch.tensor(a) for a in ARGUMENTS["gated_deltanet2"])
    want = g.exp().diag() @ S
    want = want - torch.outer(k, b * k) @ want + torch.outer(k, w * v)
    found = steps.gated_deltanet2(S, q, k, v, g, b, w)
    torch.testing.assert_close(found, (want, q @ want))
    beta = torch.tensor(BETA)
    torch.testing.assert_close(
        steps.gated_deltanet2(S, q, k, v, g, beta.expand(K), beta.expand(V)),
        steps.kda(S, q, k, v, g, beta),
    )


def test_comba_reads_with_another_key_and_before_the_decay():
    S, q, k, v = one_head(6)
    p, g, beta = (torch.tensor(a) for a in ARGUMENTS["comba"])
    want = g.exp() * S + beta * torch.outer(k, v - p @ S)
    found = steps.comba(S, q, k, v, p, g, beta)
    torch.testing.assert_close(found, (want, q @ want))
    torch.testing.assert_close(
        steps.comba(S, q, k, v, g.exp() * k, g, beta),
        steps.gated_deltanet(S, q, k, v, g, beta),
    )


def test_outer_answers_its_value_to_its_key():
    _, _, k, v = one_head(2)
    answer = steps.read(steps.outer(k, v), k / k.square().sum())
    torch.testing.assert_close(answer, v)


def test_delta_rule_with_beta_one_replaces_what_the_key_held():
    S, _, k, v = one_head(3)
    k = F.normalize(k, dim=0)
    S, _ = steps.deltanet(S, k, k, v, torch.tensor(1.0))
    torch.testing.assert_close(steps.read(S, k), v)


def test_gated_delta_rule_forgets_before_it_corrects():
    S, _, k, v = one_head(4)
    k = F.normalize(k, dim=0)
    new, o = steps.kda(
        S, k, k, v, torch.tensor(PER_CHANNEL), torch.tensor(1.0)
    )
    torch.testing.assert_close(o, v)
    other = torch.diag(torch.tensor(PER_CHANNEL).exp()) @ (
        S + torch.outer(k, v - k @ S)
    )
    assert not torch.allclose(new, other)


def test_softmax_step_is_causal_attention():
    torch.manual_seed(0)
    B, T, H = 2, 7, 3
    q, k = torch.randn(2, B, T, H, K)
    v = torch.randn(B, T, H, V)
    empty = (torch.zeros(B, H, 0, K), torch.zeros(B, H, 0, V))
    o, cache = steps.scan(steps.softmax, empty, q * K**-0.5, k, v)
    heads = (x.movedim(1, 2) for x in (q, k, v))
    ref = F.scaled_dot_product_attention(*heads, is_causal=True)
    torch.testing.assert_close(o, ref.movedim(1, 2))
    torch.testing.assert_close(cache, (k.movedim(1, 2), v.movedim(1, 2)))


def test_scan_hands_the_state_on():
    x = torch.arange(12.0).reshape(1, 4, 3)
    y = torch.ones(1, 4, 3)

    def step(state, x_t, y_t):
        return state + x_t, state * y_t

    o, state = steps.scan(step, torch.zeros(1, 3), x, y)
    torch.testing.assert_close(state, x.sum(1))
    torch.testing.assert_close(o, x.cumsum(1) - x)


def test_scan_refuses_inputs_of_different_length():
    with pytest.raises(ValueError, match="shorter"):
        steps.scan(
            lambda s, x, y: (s, x),
            torch.zeros(1),
            torch.zeros(1, 3, 2),
            torch.zeros(1, 2, 2),
        )
