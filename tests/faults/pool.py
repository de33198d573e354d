"""Faults in a pool of states and in what layers do with its rows."""

POOL = "fastweights/models/pool.py"
STATE = "fastweights/layers/state.py"
ATTENTION = "fastweights/layers/attention.py"
TESTS = {POOL: "test_pool.py"}
MUTANTS = {
    "pool-in-bf16-of-any-kind": (
        POOL,
        'sorted(kinds - NARROWED - {"softmax"})',
        "sorted(kinds - kinds)",
    ),
    "pool-rows-are-not-cleared": (
        POOL,
        "self._clear(row)\n        self.free",
        "self.free",
    ),
    "pool-m-is-cleared-to-nothing": (POOL, 'name == "m"', "False"),
    "pool-restores-the-first-row": (
        POOL,
        "kept.rows, x)",
        "0 * kept.rows, x)",
    ),
    "pool-reads-count-once": (POOL, "self.read[row] += tokens", "pass"),
    "pool-steps-in-the-first-rows": (
        STATE,
        "state=S, rows=state.rows, scale",
        "state=S[: len(q)], scale",
        "test_pool.py",
    ),
    "pool-chunks-are-not-written-back": (
        STATE,
        "                put(x, getattr(after, name).to(x.dtype), state.rows)",
        "                pass",
        "test_pool.py",
    ),
    "pool-keys-of-no-row": (
        ATTENTION,
        "place = row[:, None], at[source]",
        "place = inside(rows, keys)[:, None], at",
        "test_pool.py",
    ),
}
