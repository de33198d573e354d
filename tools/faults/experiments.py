"""Faults in experiments: runs, grids, files, tables, the program."""

TRIAL = "fastweights_lab/experiments/trial.py"
STEP = "fastweights_lab/experiments/step.py"
GRID = "fastweights_lab/experiments/grid.py"
RECORDS = "fastweights_lab/records.py"
SIDE = "fastweights_lab/experiments/side_by_side.py"
TABLE = "fastweights_lab/experiments/table.py"
CONVOLVED = "fastweights_lab/experiments/convolved.py"
RECORDING = "fastweights_lab/experiments/recording.py"
MAIN = "fastweights_lab/experiments/__main__.py"
RECURRENCE = "fastweights/layers/linear_recurrence.py"
TESTS = dict.fromkeys(
    (
        *(TRIAL, STEP, GRID, RECORDS, RECORDING, SIDE, TABLE, MAIN),
        CONVOLVED,
    ),
    "lab/test_experiments.py",
)
MUTANTS = {
    "convolved-without-the-token": (
        CONVOLVED,
        "return super().forward(x + self.before(x)[0])",
        "return super().forward(self.before(x)[0])",
    ),
    "trial-never-steps": (STEP, "        self.optimizer.step()\n", ""),
    "trial-trains-on-the-tests": (
        STEP,
        "(self.trial.seed * STEPS + i)",
        "(2**32 - 2**20 + i)",
    ),
    "trial-one-task-alone": (
        STEP,
        "self.tasks[i % len(self.tasks)]",
        "self.tasks[0]",
    ),
    "step-one-rate": (STEP, "self.rates[i]", "self.rates[0]"),
    "step-adds-gradients-up": (
        STEP,
        "        self.optimizer.zero_grad()\n",
        "",
    ),
    "step-asks-everywhere": (
        STEP,
        "(targets != IGNORE).nonzero_static",
        "(targets == targets).nonzero_static",
    ),
    "turns-one-run-at-a-time": (
        SIDE,
        "                running.append((i, going, stream))\n",
        "                running.insert(0, (i, going, stream))\n",
    ),
    "turns-lost-stream": (
        SIDE,
        "                free.append(stream)\n",
        "",
    ),
    "trial-seed-of-the-model": (
        TRIAL,
        "torch.manual_seed(trial.seed)",
        "torch.seed()",
    ),
    "trial-asks-everywhere": (
        TRIAL,
        "batch.targets != IGNORE\n",
        "batch.targets == batch.targets\n",
    ),
    "accuracy-of-all-kinds-together": (
        TRIAL,
        "index_add(0, groups, hits)",
        "add(hits.sum())",
    ),
    "accuracy-of-the-same-sequences": (TRIAL, "seed + 1024 * i", "seed"),
    "trial-always-an-mlp": (
        GRID,
        "() if self.mlp_ratio else self.pattern",
        "()",
    ),
    "grid-a-variant-changes-nothing": (
        GRID,
        "                    **variant.settings,\n",
        "",
    ),
    "grid-quick-forgets-settings": (
        GRID,
        '{**self.settings, **changed.pop("settings", {})}',
        'changed.pop("settings", {})',
    ),
    "records-keep-a-broken-line": (
        RECORDS,
        "        out.truncate(whole)\n",
        "",
    ),
    "records-read-a-broken-line": (
        RECORDS,
        "*lines, _ = file",
        "*lines, = file",
    ),
    "table-chosen-by-the-tests": (
        TABLE,
        'mean(run["validation"] for run in runs)',
        'mean(run["accuracy"]["pairs"]["recall"] for run in runs)',
    ),
    "table-one-seed-may-win": (TABLE, "return len(runs), ", "return 0, "),
    "table-seeds-unsorted": (
        TABLE,
        'lambda r: r["settings"]["seed"]',
        "lambda r: 0",
    ),
    "softmax-sees-what-comes": (
        CONVOLVED,
        "is_causal=True",
        "is_causal=False",
    ),
    "softmax-values-turn": (
        CONVOLVED,
        "            v.transpose(1, 2),",
        "            k.transpose(1, 2),",
    ),
    "table-edge-of-one-rate": (TABLE, "if len(merits) > 1 and", "if"),
    "table-edge-where-tied": (
        TABLE,
        "if x == highest]",
        "if x == highest][-1:]",
    ),
    "recorded-first-run-for-all": (
        RECORDING,
        "if all(record.get(key) == value for record in records)",
        "if True",
    ),
    "recorded-settings-of-the-run-lost": (
        RECORDING,
        '{**found["settings"], **run["settings"]}',
        'found["settings"]',
    ),
    "program-records-half-a-grid": (
        MAIN,
        "        if not left:\n",
        "        if runs:\n",
    ),
    "program-runs-all-again": (MAIN, "if run is None]", "]"),
    "program-wrong-names": (
        MAIN,
        "_name(left[i])}: {found}",
        "_name(trials[i])}: {found}",
    ),
    "program-forgets-steps": (
        MAIN,
        '{**grid.settings, "steps": asked.steps}',
        "grid.settings",
    ),
    "recurrence-always-silu": (
        RECURRENCE,
        "activation=activation",
        "activation=True",
        "layers/test_published.py",
    ),
}
