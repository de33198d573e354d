"""Faults of the language models and of their training."""

MODELS = "fastweights/models"
LOSS, MODEL = f"{MODELS}/loss.py", f"{MODELS}/model.py"
SAMPLING, FILES = f"{MODELS}/sampling.py", f"{MODELS}/files.py"
CONFIG = f"{MODELS}/config.py"
CORPUS, TRAINING = (
    "fastweights_lab/text/corpus.py",
    "fastweights_lab/text/training.py",
)
TRAIN = "fastweights_lab/text/train.py"
PLANTED = "fastweights_lab/experiments/planted.py"
TOUCHED = "models/test_touched.py"
TESTS = {
    LOSS: "models/test_models.py",
    MODEL: "models/test_models.py",
    SAMPLING: "models/test_models.py",
    FILES: "models/test_models.py",
    CONFIG: "models/test_models.py",
    CORPUS: "lab/test_train.py",
    TRAINING: "lab/test_train.py",
    TRAIN: "lab/test_train.py",
    PLANTED: "lab/test_planted.py",
}
MUTANTS = {
    "planted-the-same-number-in-both": (
        PLANTED,
        "for told in (number, other)",
        "for told in (number, number)",
    ),
    "planted-some-digits-the-same": (
        PLANTED,
        "torch.randint(1, 10,",
        "torch.randint(0, 10,",
    ),
    "planted-nearer-than-said": (
        PLANTED,
        "text[:, BEFORE + 1 :]",
        "text[:, BEFORE + 2 :]",
    ),
    "planted-one-digit-is-enough": (PLANTED, ".all(1)", ".any(1)"),
    "planted-digits-one-place-off": (
        PLANTED,
        "some[:, :-1].to(device)",
        "some.to(device)",
    ),
    "model-loss-learns-from-what-is-ignored": (
        LOSS,
        "(error @ weight).masked_fill_(~there[:, None], 0)",
        "error @ weight",
    ),
    "model-loss-of-rounded-logits": (
        LOSS,
        "F.log_softmax(logits, -1, dtype=to)",
        "F.log_softmax(logits, -1)",
    ),
    "model-loss-in-one-piece": (
        LOSS,
        "rows.split(size), targets.split(size)",
        "rows.split(10**9), targets.split(10**9)",
    ),
    "model-loss-in-pieces-of-a-row": (
        LOSS,
        "_pieces(x, targets, at_once)",
        "_pieces(x, targets, 1)",
    ),
    "model-loss-reads-what-is-ignored": (
        LOSS,
        "rows = rows.masked_fill(~there[:, None], 0)",
        "pass",
    ),
    "model-document-predicts-the-next": (
        LOSS,
        "targets = targets.index_fill(1, last, ignore_index)",
        "targets = targets.clone()",
    ),
    "model-gradients-scaled-in-half-precision": (
        LOSS,
        "(full(t) * dtotal).to(dtype)",
        "(t * dtotal.to(t.dtype)).to(dtype)",
    ),
    "model-reset-leaves-what-is-not-drawn": (
        MODEL,
        "child.apply(_reset)",
        "pass",
    ),
    "model-loss-under-no-transform": (
        LOSS,
        "if private.transformed():",
        "if False:",
    ),
    "model-head-is-not-called": (
        MODEL,
        "return self.head.weight if is_product(self.head, x) else None",
        "return self.head.weight",
        TOUCHED,
    ),
    "model-tied-embedding-is-not-called": (
        MODEL,
        "if is_plain(self.embedding, EMBEDDING, x.device):",
        "if True:",
        TOUCHED,
    ),
    "model-each-loss-past-the-model": (
        MODEL,
        "            return self(\n                tokens,\n"
        "                cu_seqlens=cu_seqlens,\n                targets",
        "            return self.forward(\n                tokens,\n"
        "                cu_seqlens=cu_seqlens,\n                targets",
        "models/test_sharded.py",
    ),
    "model-residuals-of-one-size": (
        MODEL,
        "0.02 / math.sqrt(self.config.num_branches)",
        "0.02",
    ),
    "model-gates-drawn-like-matrices": (
        MODEL,
        "if not isinstance(module, nn.Linear):\n                    _reset",
        "if False:\n                    _reset",
    ),
    "model-checkpoint-that-keeps-all": (
        MODEL,
        "again = self.checkpoint and torch.is_grad_enabled()",
        "again = False",
    ),
    "model-states-without-room": (
        SAMPLING,
        "capacity = int(lengths.max()) + max_new_tokens",
        "capacity = 1",
    ),
    "model-prompts-end-early": (
        SAMPLING,
        "x[0, cu_seqlens[1:] - 1]",
        "x[0, cu_seqlens[1:] - 2]",
    ),
    "stream-forgets-who-is-done": (
        SAMPLING,
        "done |= torch.isin",
        "done = torch.isin",
        "models/test_sampling.py",
    ),
    "stream-lends-what-it-reads": (
        SAMPLING,
        "yield token.clone()",
        "yield token",
        "models/test_sampling.py",
    ),
    "sampling-looks-at-the-first-logits-only": (
        SAMPLING,
        "finite &= (logits.amax(-1).isfinite() | done).all()",
        "finite &= bool(step) | (logits.amax(-1).isfinite() | done).all()",
        "models/test_sampling.py",
    ),
    "sampling-of-a-temperature-of-nothing": (
        SAMPLING,
        "max(temperature, least)",
        "temperature",
        "models/test_sampling.py",
    ),
    "sampling-of-large-logits": (
        SAMPLING,
        "logits.float() - logits.amax(-1, keepdim=True).float()",
        "logits.float()",
        "models/test_sampling.py",
    ),
    "model-bytes-of-half-a-token-more": (
        "fastweights/layers/layer.py",
        "return after(1024) + per_token",
        "return after(1024) + per_token // 2 + per_token",
        "models/test_sampling.py",
    ),
    "model-stop-token-is-written": (
        SAMPLING,
        "(is_end.cumsum(1) == 0)",
        "(is_end.cumsum(1) <= 1)",
    ),
    "model-top-p-takes-one-more": (
        SAMPLING,
        "p.where(p.cumsum(-1) - p < top_p, 0)",
        "p.where(p.cumsum(-1) - p <= top_p, 0)",
    ),
    "model-tied-head-is-forgotten": (
        CONFIG,
        "known = {f.name for f in fields(cls)}",
        'found.pop("tie_embeddings")\n'
        "        known = {f.name for f in fields(cls)}",
    ),
    "model-branches-without-mlps": (
        CONFIG,
        "return self.num_layers + sum(mlps)",
        "return self.num_layers + len(mlps)",
    ),
    "model-options-of-all-win": (
        CONFIG,
        "return found | dict(self.options.get(kind, {}))",
        "return dict(self.options.get(kind, {})) | found",
    ),
    "model-file-of-another-dtype": (
        FILES,
        "dtype = next(iter(there.values())).dtype",
        "pass",
    ),
    "model-file-for-its-owner": (
        FILES,
        "path.chmod(",
        "int(",
    ),
    "model-saved-without-numbers": (
        FILES,
        "or x.is_meta",
        "",
        "models/test_models.py::test_a_parameter_that_is_not_there"
        "_is_not_saved",
    ),
    "model-shapes-unchecked": (
        FILES,
        "there[name].shape != x.shape",
        "False",
    ),
    "train-held-out-text-is-read": (
        CORPUS,
        "train, held_out = documents[:cut], documents[cut:]",
        "train, held_out = documents, documents[cut:]",
    ),
    "train-windows-of-every-step-alike": (
        CORPUS,
        "manual_seed(seed * 1_000_003 + step)",
        "manual_seed(seed)",
    ),
    "train-packed-parts-overlap": (
        CORPUS,
        "first = step * self.length + part * T",
        "first = step * self.length",
    ),
    "train-packed-order-of-the-pass-before": (
        CORPUS,
        "self._passes.get(epoch)",
        "next(iter(self._passes.values()), None)",
    ),
    "train-first-document-without-separator": (
        CORPUS,
        "tokens[begin[:-1]] =",
        "tokens[begin[1:-1]] =",
    ),
    "train-ngrams-overflow": (
        CORPUS,
        "if size * vocabulary > 2**63:",
        "if False:",
    ),
    "train-first-of-a-pair-is-repeated": (
        CORPUS,
        "again[:, 1:] = kind",
        "again[:, :-1] = kind",
    ),
    "train-optimizer-starts-anew": (
        TRAINING,
        'self.optimizer.load_state_dict(state["optimizer"])',
        "pass",
    ),
    "train-accumulates-a-sum": (
        TRAINING,
        "(loss / settings.accumulate).backward()",
        "loss.backward()",
    ),
    "train-rate-without-warm-up": (
        TRAINING,
        "return self.lr * (step + 1) / self.warmup",
        "return self.lr",
    ),
    "train-goes-on-with-another-text": (
        TRAINING,
        "if text != found:",
        "if False:",
    ),
    "train-goes-on-with-another-tokenizer": (
        TRAINING,
        'if tokenizer != before.get("tokenizer", tokenizer):',
        "if False:",
    ),
    "train-rate-a-step-late": (
        TRAINING,
        "settings.learning_rate(self.done)",
        "settings.learning_rate(max(0, self.done - 1))",
    ),
    "train-applies-what-is-no-number": (
        TRAINING,
        "if not self.norm.isfinite():",
        "if self.norm.isnan():",
    ),
    "train-evaluates-in-fp32": (
        TRAINING,
        "torch.arange(number) * last // max(1, number - 1)",
        "torch.linspace(0, last, number).long()",
    ),
    "train-separator-is-a-count": (
        CORPUS,
        "max(self._inner.get_vocab().values(), default=-1) + 1",
        "self._inner.get_vocab_size()",
    ),
    "train-reads-hidden-folders": (
        CORPUS,
        'name for name in folders if not name.startswith(".")',
        "name for name in folders if name",
    ),
    "train-stops-without-a-checkpoint": (
        TRAIN,
        "step == settings.steps or stop:",
        "step == settings.steps:",
    ),
    "train-holds-the-model-to-the-end": (
        TRAIN,
        "        training = Training(",
        "        global training\n                training = Training(",
    ),
}
