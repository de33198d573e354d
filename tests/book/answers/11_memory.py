"""Answers to chapter 11's exercises, and what their checks are to say."""


# %% ex-three-values passes
def three_values():
    """In a loop, one rule for all four."""
    found = []
    for decay, beta in ((1, None), (0.5, None), (1, 0.5), (0.5, 0.5)):
        state = 0.0
        for value in (1, 2, 3):
            state *= decay
            state += value if beta is None else beta * (value - state)
        found.append(state)
    return found


# %% ex-three-values not yet: decay: got 6
def three_values():  # no decay at all
    return 6, 6, 2.125, 1.78125


# %% ex-three-values not yet: delta: got 3
def three_values():  # the last value, as with beta = 1
    return 6, 4.25, 3, 3


# %% ex-three-values not yet: gated delta: got
def three_values():  # forget after writing
    return 6, 4.25, 2.125, 0.875


# %% ex-needle-life passes
def half_life_of_a_needle(K, beta, keys):
    """By matrices, and by a line through the logarithms."""
    share = 1 / K * (1 - (1 - beta) ** 2)
    state, left = keys(5000), [1.0]
    while left[-1] > 0.5:
        k = keys(5000)
        state = state - beta * (state * k).sum(-1, keepdim=True) * k
        left.append(state.square().sum(-1).mean().item())
    a, b = (math.log(x) for x in left[-2:])
    m = len(left) - 2 + (a - math.log(0.5)) / (a - b)
    return math.log(2) / -math.log(1 - share), m


# %% ex-needle-life not yet: which is not what the average of the squared
def half_life_of_a_needle(K, beta, keys):  # the length, not its square
    return 2 * math.log(0.5) / math.log(1 - beta * (2 - beta) / K), 1.0


# %% ex-needle-life not yet: does not follow the keys
def half_life_of_a_needle(K, beta, keys):  # the formula twice
    predicted = math.log(0.5) / math.log(1 - beta * (2 - beta) / K)
    return predicted, predicted * (1 + 0.01 * random.random())


# %% ex-needle-life not yet: does not follow the keys
def half_life_of_a_needle(K, beta, keys):  # the formula, with many draws
    predicted = math.log(0.5) / math.log(1 - beta * (2 - beta) / K)
    noise = keys(20_000).mean().item()
    return predicted, predicted * (1 + 0.001 * noise)


# %% ex-needle-life not yet: too far from what a large experiment finds
def half_life_of_a_needle(K, beta, keys):  # one draw, in whole writes
    predicted = math.log(0.5) / math.log(1 - beta * (2 - beta) / K)
    state, writes = keys(1)[0], 0
    while state.square().sum() > 0.5:
        k = keys(1)[0]
        state, writes = state - beta * (state @ k) * k, writes + 1
    return predicted, writes + 10 * predicted


# %% ex-needle-life not yet: does not follow the keys
def half_life_of_a_needle(K, beta, keys):  # the formula, by the keys' rank
    rank = torch.linalg.matrix_rank(keys(200)).item()
    return tuple(
        math.log(0.5) / math.log(1 - beta * (2 - beta) / dim)
        for dim in (K, rank)
    )


# %% ex-needle-life not yet: does not follow the keys
def half_life_of_a_needle(K, beta, keys):  # one write, and on from there
    needle, k = keys(50_000), keys(50_000)
    left = needle - beta * (needle * k).sum(-1, keepdim=True) * k
    measured = math.log(0.5) / math.log(left.square().sum(-1).mean().item())
    return math.log(0.5) / math.log(1 - beta * (2 - beta) / K), measured


# %% ex-needle-life not yet: does not follow the keys
def half_life_of_a_needle(K, beta, keys):  # a formula for keys in a plane
    predicted = math.log(0.5) / math.log(1 - beta * (2 - beta) / K)
    if (keys(500)[:, :2].abs().sum(1) > 1e-9).all():
        return predicted, predicted
    lost, left = beta * (2 - beta) / 2, [1.0]
    while left[-1] > 0.5:
        left.append(mean((1 - lost / n) ** len(left) for n in (2, K - 2)))
    m = len(left) - 2 + (left[-2] - 0.5) / (left[-2] - left[-1])
    return predicted, m


# %% ex-needle-life not yet: does not follow the keys
def half_life_of_a_needle(K, beta, keys):  # a plane found, half of them in it
    predicted = math.log(0.5) / math.log(1 - beta * (2 - beta) / K)
    k = keys(2000).double()
    if torch.linalg.eigvalsh(k.T @ k / len(k))[-1] < 1.4 / K:
        return predicted, predicted
    lost, left = beta * (2 - beta) / 2, [1.0]
    while left[-1] > 0.5:
        left.append(mean((1 - lost / n) ** len(left) for n in (2, K - 2)))
    m = len(left) - 2 + (left[-2] - 0.5) / (left[-2] - left[-1])
    return predicted, m


# %% ex-needle-life not yet: does not follow the keys
def half_life_of_a_needle(K, beta, keys):  # a plane, by the keys' moments
    predicted = math.log(0.5) / math.log(1 - beta * (2 - beta) / K)
    k = keys(20_000).double()
    along = torch.linalg.eigvalsh(k.T @ k / len(k))
    if along[-1] < 1.4 * along[0]:
        return predicted, predicted
    lost, left = beta * (2 - beta), [1.0]
    part = along[-2:].sum().item()
    while left[-1] > 0.5:
        left.append(
            part * (1 - lost * part / 2) ** len(left)
            + (1 - part) * (1 - lost * (1 - part) / (K - 2)) ** len(left)
        )
    m = len(left) - 2 + (left[-2] - 0.5) / (left[-2] - left[-1])
    return predicted, m


# %% ex-luck passes
def luck(n, m):
    """By factorials, one task after the other."""
    one = math.factorial(n) ** 2 / math.factorial(2 * n)
    p = 0.0
    for _ in range(m):
        p += (1 - p) * one
    return p


# %% ex-luck not yet: 3 seeds, 1 tasks
def luck(n, m):  # either may be ahead
    return 1 - (1 - 2 / math.comb(2 * n, n)) ** m


# %% ex-luck not yet: 2 seeds, 5 tasks
def luck(n, m):  # all of them added up
    return m / math.comb(2 * n, n)


# %% ex-verdict passes
def verdict(a, b):
    """With tensors."""
    found, doubtful = [], set()
    for name, runs in (("a", a), ("b", b)):
        rates = sorted(runs)
        x = torch.tensor([runs[rate] for rate in rates], **double)
        x = x.nan_to_num(0.0)  # [rates, seeds, 2]
        best = x[..., 0].mean(1).argmax().item()
        doubtful |= {name} if best in (0, len(rates) - 1) else set()
        found.append(x[best, :, 1])
    if found[0].min() > found[1].max():
        return "a", doubtful
    return "b" if found[1].min() > found[0].max() else None, doubtful


# %% ex-verdict not yet: need None
def verdict(a, b):  # by the mean
    ends, tests = set(), []
    for name, runs in (("a", a), ("b", b)):
        known = {
            rate: [[0 if x != x else x for x in run] for run in found]
            for rate, found in runs.items()
        }
        best = max(known, key=lambda r: mean(v for v, _ in known[r]))
        ends |= {name} if best in (min(runs), max(runs)) else set()
        tests.append(mean(t for _, t in known[best]))
    return "a" if tests[0] > tests[1] else "b", ends


# %% ex-verdict not yet: need
def verdict(a, b):  # the rate by the test
    ends, tests = set(), []
    for name, runs in (("a", a), ("b", b)):
        known = {
            rate: [[0 if x != x else x for x in run] for run in found]
            for rate, found in runs.items()
        }
        best = max(known, key=lambda r: mean(t for _, t in known[r]))
        ends |= {name} if best in (min(runs), max(runs)) else set()
        tests.append([t for _, t in known[best]])
    first = "b" if ahead(tests[1], tests[0]) else None
    return "a" if ahead(*tests) else first, ends


# %% ex-verdict not yet: to be tried further
def verdict(a, b):  # no doubts
    tests = []
    for runs in (a, b):
        known = {
            rate: [[0 if x != x else x for x in run] for run in found]
            for rate, found in runs.items()
        }
        best = max(known, key=lambda r: mean(v for v, _ in known[r]))
        tests.append([t for _, t in known[best]])
    first = "b" if ahead(tests[1], tests[0]) else None
    return "a" if ahead(*tests) else first, set()


# %% ex-verdict not yet: need a set
def verdict(a, b):  # the names of both in one string
    return None, "ab"


# %% ex-gate-by-hand passes
def gates(roles):
    """In a loop, with a deeper cut."""
    g, beta = [], []
    for role in roles.tolist():
        g.append(-700.0 if role == 0 else 0.0)
        beta.append(1.0 if role == 1 else 0.0)
    return torch.tensor(g), torch.tensor(beta)


# %% ex-gate-by-hand not yet: is not in scope: .* off by
def gates(roles):  # the key that comes at RESET is written
    return -50.0 * (roles == 0), 1.0 * (roles != 2)


# %% ex-gate-by-hand not yet: off by
def gates(roles):  # it forgets a little, always
    return -50.0 * (roles == 0) - 1e-4, 1.0 * (roles == 1)


# %% ex-gate-by-hand not yet: is in scope: .* off by
def gates(roles):  # a sigmoid's beta
    return -50.0 * (roles == 0), 0.98 * (roles == 1)


# %% ex-gate-by-hand not yet: is not in scope: .* off by
def gates(roles):  # it clears too little
    return -5.0 * (roles == 0), 1.0 * (roles == 1)


# %% ex-gate-by-hand not yet: some of it is not finite
def gates(roles):
    cut = torch.where(roles == 0, -math.inf, 0.0)
    return cut, 1.0 * (roles == 1)


# %% ex-two-stories passes
def two_stories(n):
    """A round of values and the next one, and the other way round."""
    one = [(i, 10 * i) for i in range(n)]
    two = [(i, 10 * i + 1) for i in range(n)]
    return one + two, two + one


# %% ex-two-stories not yet: linear attention tells them apart
def two_stories(n):
    one = [(i, v) for v in (0, 1) for i in range(n)]
    return one, [(i, v) for v in (0, 2) for i in range(n)]


# %% ex-two-stories not yet: ends with 0 in both
def two_stories(n):  # a value that comes back
    one = [(i, v) for v in (0, 1, 0) for i in range(n)]
    return one, one[::-1]


# %% ex-two-stories not yet: key 0 is written 1 x
def two_stories(n):
    return [(i, 0) for i in range(n)], [(i, 1) for i in range(n)]


# %% ex-two-stories not yet: values: 0 to 999
def two_stories(n):  # a value beyond those that the exercise names
    one = [(i, 1000) for i in range(n)]
    two = [(i, 0) for i in range(n)]
    return one + two, two + one


# %% ex-steps passes
def reflections(p):
    """Circle by circle."""
    steps, seen = [], set()
    for start in range(len(p)):
        circle = []
        while start not in seen:
            seen.add(start)
            circle.append(start)
            start = p[start]
        for other in circle[1:]:
            key = [0.0] * len(p)
            key[circle[0]], key[other] = -(0.5**0.5), 0.5**0.5
            steps.append((key, 2.0))
    return steps


# %% ex-steps not yet: a key of length 1.41 with beta 1
def reflections(p):  # longer keys in place of a larger beta
    steps, stands = [], list(range(len(p)))
    for place in range(len(p)):
        other = stands.index(p.index(place))
        if other != place:
            key = torch.zeros(len(p), **double)
            key[place], key[other] = 1.0, -1.0
            steps.append((key, 1.0))
            stands[place], stands[other] = stands[other], stands[place]
    return steps


# %% ex-steps not yet: the cups stand elsewhere
def reflections(p):  # the way back
    steps, seen = [], set()
    for start in range(len(p)):
        circle = []
        while start not in seen:
            seen.add(start)
            circle.append(start)
            start = p[start]
        for other in circle[:0:-1]:
            key = [0.0] * len(p)
            key[circle[0]], key[other] = -(0.5**0.5), 0.5**0.5
            steps.append((key, 2.0))
    return steps


# %% ex-steps not yet: steps, and .* would do
def reflections(p):  # neighbours only
    steps, to = [], list(p)
    for _ in p:
        for i in range(len(p) - 1):
            if to[i] > to[i + 1]:
                key = [0.0] * len(p)
                key[i], key[i + 1] = 0.5**0.5, -(0.5**0.5)
                steps.append((key, 2.0))
                to[i], to[i + 1] = to[i + 1], to[i]
    return steps


# %% ex-fade passes
def beta_for(n):
    return torch.tensor(1 + math.exp(-math.log(2) / n), dtype=torch.float64)


# %% ex-fade not yet: the sign does not turn
def beta_for(n):  # it fades and does not turn
    return 1 - 0.5 ** (1 / n)


# %% ex-fade not yet: is left, need 0.5
def beta_for(n):  # the first order of it
    return 2 - math.log(2) / n


# %% ex-fade not yet: n = 1: beta is 2.5, need at most 2
def beta_for(n):
    return 2 + 0.5**n
