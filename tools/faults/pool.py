"""Faults in a pool of states and in what layers do with its rows."""

POOL = "fastweights/models/pool.py"
STATE = "fastweights/layers/state.py"
ATTENTION = "fastweights/layers/attention.py"
ARGUMENTS = "fastweights/layers/arguments.py"
SERVING = "fastweights/serving.py"
TESTS = {POOL: "models/test_pool.py"}
MUTANTS = {
    "pool-in-bf16-of-any-kind": (
        POOL,
        'sorted(kinds - NARROWED - {"softmax"})',
        "sorted(kinds - kinds)",
    ),
    "pool-rows-are-not-cleared": (
        POOL,
        "        self._clear(row)\n        self.read",
        "        self.read",
    ),
    "pool-m-is-cleared-to-nothing": (POOL, 'name == "m"', "False"),
    "pool-restores-the-first-row": (
        POOL,
        "index_copy_(0, to, x",
        "index_copy_(0, 0 * to, x",
    ),
    "pool-reads-count-once": (POOL, "self.read[row] += n", "pass"),
    "pool-restore-forgets-what-was-read": (
        POOL,
        "self.read[row] = kept.read[place]",
        "pass",
    ),
    "pool-restores-what-was-given-back": (
        POOL,
        "self.read[row], self._kept[row] = 0, {}",
        "self.read[row] = 0",
    ),
    "pool-restores-what-went-back-further": (
        POOL,
        "while (\n                self._grows",
        "while (\n                not self._grows",
    ),
    "pool-refuses-its-last-token": (
        POOL,
        "self.read[r] + n > self.capacity",
        "self.read[r] + n >= self.capacity",
    ),
    "pool-never-asks-what-was-read": (
        POOL,
        "            self._recount()",
        "            pass",
    ),
    "pool-believes-what-it-was-told": (
        POOL,
        "any(state.used > most for state in told)",
        "False",
    ),
    "pool-keeps-what-it-was-told": (
        POOL,
        '_taken("rows", rows)\n        self._settle()\n',
        '_taken("rows", rows)\n',
    ),
    "pool-has-no-room-for-the-last-token": (
        ATTENTION,
        "if used > keys.shape[1]",
        "if used >= keys.shape[1]",
        "models/test_pool.py",
    ),
    "pool-takes-a-row-for-the-longest": (
        ATTENTION,
        "used = int(position.where(there, 0).max())",
        "used = state.used + rows.longest",
        "models/test_pool.py",
    ),
    "softmax-takes-a-row-for-the-longest": (
        ATTENTION,
        "used = int(position.where(there, 0).max())",
        "used = state.used + rows.longest",
        "layers/test_state.py",
    ),
    "softmax-counts-what-pads-a-row": (
        ATTENTION,
        "used = int(position.where(there, 0).max())",
        "used = max(used, int(position.where(there, 0).max()))",
        "layers/test_state.py",
    ),
    "pool-writes-past-a-full-row": (
        ATTENTION,
        "at[source].clamp(max=keys.shape[1] - 1)",
        "at[source]",
        "models/test_pool.py",
    ),
    "state-of-a-convolution-under-autocast": (
        "fastweights/layers/convolution.py",
        ".to(autocast(x)[0].dtype)",
        "",
        "layers/test_state.py",
    ),
    "state-of-inference-mode-stays-there": (
        STATE,
        "setattr(state, name, x.clone())",
        "pass",
        "layers/test_state.py",
    ),
    "step-on-a-state-of-inference-mode": (
        SERVING,
        "with torch.inference_mode():",
        "if True:",
        "test_serving.py",
    ),
    "pool-made-under-autocast": (
        POOL,
        "torch.autocast(device.type, enabled=False)",
        "torch.autocast('cpu', enabled=torch.is_autocast_enabled('cpu'))",
    ),
    "pool-made-in-inference-mode": (
        POOL,
        "torch.inference_mode(False)",
        "torch.inference_mode(torch.is_inference_mode_enabled())",
    ),
    "graph-of-one-batch": (
        ARGUMENTS,
        "rows = x.shape[0]",
        "rows = len(x)",
        "ops/test_export.py",
    ),
    "graph-of-gates-of-one-batch": (
        "fastweights/arguments.py",
        "if g.shape != gates.get(g.dim()):",
        "if g.shape not in tuple(gates.values()):",
        "ops/test_export.py",
    ),
    "graph-of-more-than-one-token": (
        "fastweights/reference/backend.py",
        "        return o, state, saved\n    o = v",
        "        return o, state, []\n    o = v",
        "ops/test_export.py",
    ),
    "graph-without-states": (
        STATE,
        "torch.export.register_dataclass(",
        "(lambda *given, **named: None)(",
        "ops/test_export.py",
    ),
    "layer-rows-of-any-shape": (
        ARGUMENTS,
        'check_rows(state.rows, rows, name="state: rows")',
        "pass",
        "layers/test_state.py",
    ),
    "layer-states-of-any-size": (
        ARGUMENTS,
        "if shape[len(some) :] != need:",
        "if False:",
        "layers/test_state.py",
    ),
    "layer-position-of-any-dtype": (
        ARGUMENTS,
        "needs = (torch.int64,)",
        "pass",
        "layers/test_state.py",
    ),
    "layer-state-on-any-device": (
        ARGUMENTS,
        "if tensor.device != x.device:",
        "if False:",
        "layers/test_state.py",
    ),
    "layer-offsets-of-any-value": (
        ARGUMENTS,
        "check_packed(x, cu_seqlens)",
        "pass",
        "layers/test_arguments.py",
    ),
    "rows-twice": (
        "fastweights/arguments.py",
        "if len(set(there)) < len(there):",
        "if False:",
        "test_serving.py",
    ),
    "step-of-mlstm-keeps-what-is-empty": (
        SERVING,
        "of_empty=CLEARS",
        "of_empty=0.0",
        "test_serving.py",
    ),
    "step-of-rows-beyond-a-pool": (
        SERVING,
        "there = (rows >= 0) & (rows < state.shape[0])",
        "there = rows >= 0",
        "test_serving.py",
    ),
    "step-writes-rows-beyond-a-pool": (
        SERVING,
        "there = (rows >= 0) & (rows < pool.shape[0])",
        "there = rows >= 0",
        "test_serving.py",
    ),
    "step-of-mlstm-in-narrow-units": (
        SERVING,
        "        besides = ()\n",
        "",
        "test_serving.py",
    ),
    "decode-of-no-row": (
        SERVING,
        "if there.any():",
        "if True:",
        "test_serving.py",
    ),
    "pool-steps-in-the-first-rows": (
        STATE,
        "state=S, rows=own.rows, scale",
        "state=S[: len(q)], scale",
        "models/test_pool.py",
    ),
    "pool-chunks-are-not-written-back": (
        STATE,
        "                put(x, getattr(after, name).to(x.dtype), state.rows)",
        "                pass",
        "models/test_pool.py",
    ),
    "pool-keys-of-no-row": (
        ATTENTION,
        "row[:, None], at[source]",
        "inside(rows, keys)[:, None], at",
        "models/test_pool.py",
    ),
}
