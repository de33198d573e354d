"""Faults in the tasks: what is drawn, asked, and said to be needed."""

BATCH = "fastweights_lab/tasks/batch.py"
RECALL = "fastweights_lab/tasks/recall.py"
NEEDLES = "fastweights_lab/tasks/needles.py"
SCOPE = "fastweights_lab/tasks/scope.py"
STATES = "fastweights_lab/tasks/states.py"
COPYING = "fastweights_lab/tasks/copying.py"
TESTS = dict.fromkeys(
    (BATCH, RECALL, NEEDLES, SCOPE, STATES, COPYING),
    "lab/test_tasks.py",
)
MUTANTS = {
    "tasks-answers-at-ask": (
        BATCH,
        "alternating(nothing, answers)",
        "alternating(answers, nothing)",
    ),
    "tasks-last-times-are-the-first": (BATCH, '"amax"', '"amin"'),
    "tasks-seed-is-forgotten": (
        BATCH,
        "manual_seed(seed)",
        "manual_seed(seed // 2)",
    ),
    "recall-slots-in-order": (
        RECALL,
        ".topk(self.pairs, -1).indices",
        ".topk(self.pairs, -1).indices.sort(-1).values",
    ),
    "recall-power": (RECALL, "(self.power - 1)", "self.power"),
    "recall-noise": (RECALL, "(log_p - noise.log())", "(log_p - noise)"),
    "recall-filler-of-half-the-tokens": (
        RECALL,
        "draws.integers(self.vocabulary, rows, self.length)",
        "draws.integers(half, rows, self.length)",
    ),
    "recall-bits": (RECALL, "math.perm(", "math.comb("),
    "overwriting-order-of-values": (
        RECALL,
        "order // self.writes",
        "order % n",
    ),
    "repeated-readings-in-one-order": (
        RECALL,
        "draws.orders(self.pairs, rows, self.writes).flatten(1)",
        "draws.orders(self.pairs, rows).repeat(1, self.writes)",
    ),
    "needles-never-first": (
        NEEDLES,
        "start = draws.integers(self.segments, rows, 1)",
        "start = draws.integers(self.segments, rows, 1).clamp_min(1)",
    ),
    "needles-lose-a-token": (
        NEEDLES,
        "torch.where(here < start, here, here - size)",
        "torch.where(here < start, here, here - size + 1)",
    ),
    "needles-constant-line-is-asked": (
        NEEDLES,
        "        if self.level == 1:\n            question = told",
        "        if self.level == 0:\n            question = told",
    ),
    "needles-held": (
        NEEDLES,
        "self.marked + (self.pairs if self.level > 1 else 0)",
        "self.marked + self.pairs",
    ),
    "scope-one-key-asked": (
        SCOPE,
        "names[..., some]",
        "names[..., :1].expand_as(others)",
    ),
    "scope-asks-about-keys-inside": (SCOPE, "- 2 * here", "- 0 * here"),
    "scope-prefers-new-keys": (SCOPE, "+ before", "- 1.0 * before"),
    "scope-questions-in-order": (
        SCOPE,
        "mixed = draws.orders(2 * self.questions, *shape)",
        "mixed = torch.arange(2 * self.questions).expand(*shape, -1)",
    ),
    "scope-bits-without-keys": (SCOPE, "return which + ", "return "),
    "states-product-from-the-right": (
        STATES,
        "table[x[:, :-d], x[:, d:]]",
        "table[x[:, d:], x[:, :-d]]",
    ),
    "states-distances": (STATES, "d *= 2", "d *= 3"),
    "states-target-at-the-first-part": (
        STATES,
        "targets[:, self.parts :: self.parts]",
        "targets[:, 1 :: self.parts]",
    ),
    "states-chance-of-no-order": (STATES, "p.max().item()", "1 / len(p)"),
    "groups-odd-permutations": (STATES, "turned % 2 == 0", "turned % 3 == 0"),
    "groups-products-the-other-way": (
        STATES,
        "tuple(b[i] for i in a)",
        "tuple(a[i] for i in b)",
    ),
    "copying-unsorted": (COPYING, ".sort(-1).values", ""),
}
