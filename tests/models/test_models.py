"""Language models: loss, states, generation, files, for every layer."""

import builtins
import json
import math

import pytest
import torch
import torch.nn.functional as F
from support.graphs import in_one_graph
from support.inputs import Largest
from support.model_cases import (
    HYBRID,
    KINDS,
    make_config,
    make_model,
    token_ids,
)
from support.refused import refused
from torch import nn

from fastweights import models
from fastweights.models import LAYERS, LanguageModel, ModelConfig


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_agree(found, expected, atol=1e-6):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=atol)


# Configs.


def test_a_config_survives_json():
    c = make_config(3 * ("kda",) + ("softmax",), num_layers=9, head_dim=8)
    assert ModelConfig.from_json(c.to_json()) == c
    assert c.layer_types == 2 * (3 * ("kda",) + ("softmax",)) + ("kda",)
    c = make_config(options={"kda": {"A_range": [0.5, 2.0]}})
    assert c.options == {"kda": {"A_range": (0.5, 2.0)}}
    read = ModelConfig.from_json(c.to_json())
    assert read == c and {read: 1}[c] == 1


def test_a_config_of_an_earlier_version_is_read():
    before = {
        "pattern": ["gla", "retention", "softmax", "lact", "ttt_mlp", "mlstm"],
        "options": {
            "gla": {"expand_k": 0.25, "expand_v": 0.5},
            "retention": {"theta": 100.0, "expand_v": 1.0},
            "softmax": {"theta": None, "qk_norm": True},
            "lact": {"base_lr": 0.1},
            "ttt_mlp": {"base_lr": 0.5},
            "mlstm": {"cap": 9.0},
            "mesanet": {"steps": 3},
            "recurrence": {"normalize": False, "activation": False},
            "deltanet": {"qk_norm": "sum", "expand_v": 2.0},
        },
    }
    sizes = {"vocab_size": 9, "dim": 8, "num_layers": 6}
    c = ModelConfig.from_json(json.dumps(sizes | before))
    assert c.options == {
        "gla": {"qk_factor": 0.25, "v_factor": 0.5},
        "retention": {"rope_theta": 100.0, "v_factor": 1.0},
        "softmax": {"rope_theta": None, "qk_norm": True},
        "lact": {"initial_rate": 0.1},
        "ttt_mlp": {"max_rate": 0.5},
        "mlstm": {"gate_cap": 9.0},
        "mesanet": {"solver_steps": 3},
        "recurrence": {"qk_l2norm": False, "activation": False},
        "deltanet": {"qk_norm_type": "sum", "expand_v": 2.0},
    }
    plain = sizes | {"pattern": ["retention"], "head_dim": 8}
    c = ModelConfig.from_json(json.dumps(plain))
    assert c == ModelConfig(**sizes, pattern=("retention",))


def test_a_head_dim_is_refused_where_no_layer_takes_it():
    for kind in ("gla", "retention", "mlstm", "lact"):
        said = f"head_dim: got 8, which no layer of {kind} takes, need None"
        with pytest.raises(ValueError, match=said):
            make_config((kind,), head_dim=8)
        assert make_config((kind, "kda"), head_dim=8).head_dim == 8


def test_the_mlp_is_rounded_up_as_published():
    assert ModelConfig(9, 1024, 2).mlp_width == 2816
    assert ModelConfig(9, 128, 2).mlp_width == 512
    for i in range(99):
        D, width = 64 + 8 * i, 136 + 24 * i
        c = ModelConfig(9, D, 1, mlp_ratio=width / D, mlp_multiple=1)
        assert c.mlp_width == width
    blocks = make_model(("mamba", "softmax")).blocks
    assert [block.mlp is None for block in blocks] == [True, False]


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("vocab_size", 0, "vocab_size: got 0, need an integer >= 1"),
        ("hidden_size", 9, "hidden_size: got 9, need it as dim"),
        (
            "rnn",
            9,
            "rnn: got 9, which ModelConfig does not take, need one of voc",
        ),
        ("dim", 32.0, "dim: got float, need an int"),
        ("num_heads", 5, "num_heads: got 5, need a divisor of dim = 32"),
        ("num_layers", "2", "num_layers: got str, need an int"),
        ("pattern", (), "pattern: got nothing, need a type"),
        ("pattern", "kda", "pattern: got the string 'kda', need a tuple"),
        ("pattern", ("lstm",), "pattern: got 'lstm', need one of comba"),
        ("mlp_ratio", 0, "mlp_ratio: got 0, need > 0"),
        ("norm_eps", "x", "norm_eps: got str, need a real number"),
        ("tie_embeddings", 1, "tie_embeddings: got 1, need True or False"),
        ("options", {"rnn": {}}, "options: got 'rnn', need one of"),
        ("options", {"kda": {"H": 2}}, "options: got 'H' for kda, need one"),
        ("options", {"kda": None}, "options: got None for kda, need a dict"),
        ("pattern", ([],), "pattern: got [], need one of comba"),
        (
            "types_without_mlp",
            None,
            "types_without_mlp: got None, need a tuple",
        ),
        (
            "types_without_mlp",
            ("rnn",),
            "types_without_mlp: got 'rnn', need one of",
        ),
        (
            "post_norm_types",
            "gla",
            "post_norm_types: got the string 'gla', need a tuple",
        ),
        ("mlp_ratio", math.inf, "mlp_ratio: got inf, need a finite number"),
    ],
)
def test_a_config_says_what_does_not_fit(field, value, said):
    with pytest.raises((TypeError, ValueError)) as error:
        make_config(**{field: value})
    assert str(error.value).startswith(said)


def test_options_reach_the_layers_of_their_kind():
    m = make_model(
        ("softmax", "lightning"), options={"softmax": {"num_kv_heads": 1}}
    )
    assert m.blocks[0].layer.qkv_proj.out_features == 64
    assert m.blocks[1].layer.layer == 1


def test_options_of_a_kind_win_over_those_of_all():
    options = {"softmax": {"num_heads": 1, "head_dim": 8}}
    m = make_model(("softmax", "kda"), head_dim=4, options=options)
    softmax, kda = (m.blocks[i].layer.o_proj.in_features for i in (0, 1))
    assert (softmax, kda) == (8, 2 * 4)
    m = make_model(("lightning",), options={"lightning": {"num_layers": 9}})
    assert m.blocks[1].layer.num_layers == 9


def test_branches_are_layers_and_the_mlps_that_there_are():
    c = make_config(("mamba", "softmax", "gla"), num_layers=4)
    assert c.num_branches == 4 + 2
    assert make_config(("gla",), types_without_mlp=("gla",)).num_branches == 2


def test_a_block_norms_what_it_reads_or_what_it_adds():
    def normed(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    for kind in ("kda", "gla"):  # the second is in post_norm_types
        m, post = make_model((kind,), num_layers=1), kind == "gla"
        (block,) = m.blocks
        for p in m.parameters():
            if p.dim() == 1:
                nn.init.uniform_(p, 0.5, 1.5)
        w = block.norm.weight, block.mlp_norm.weight
        branches = block.layer, block.mlp
        y = x = torch.randn(2, 5, 32)
        for f, weight in zip(branches, w, strict=True):
            read = y if post else normed(y, weight)
            add = f(read)[0] if f is block.layer else f(read)
            y = y + (normed(add, weight) if post else add)
        torch.testing.assert_close(block(x)[0], y)


class Shift(nn.Module):
    """Each token sees the one before it."""

    def __init__(self, dim, scale=1.0, *, device=None, dtype=None):
        super().__init__()
        self.scale = scale
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)

    def forward(self, x, state=None, cu_seqlens=None):
        y = F.pad(x[:, :-1], (0, 0, 1, 0))
        return self.scale * self.proj(y), None


def test_a_layer_of_ones_own(monkeypatch):
    monkeypatch.setitem(LAYERS, "shift", Shift)
    m = make_model(("shift", "gla"), options={"shift": {"scale": 0.5}})
    assert m.blocks[0].layer.scale == 0.5
    m.loss(token_ids(2, 9)).backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_made_on_meta_is_drawn(kind):
    """As the constructor draws: what is constant there is the same here."""
    fresh = make_model((kind,), num_layers=1)
    empty = LanguageModel(fresh.config, device=torch.device("meta"))
    empty = empty.to_empty(device="cpu")
    for p in empty.parameters():
        nn.init.constant_(p, math.nan)
    empty.reset_parameters()
    for (name, p), want in zip(
        empty.named_parameters(), fresh.parameters(), strict=True
    ):
        assert p.isfinite().all(), name
        if want.numel() > 1 and want.max() == want.min():
            assert p.equal(want), name


def test_what_the_parameters_start_from():
    m = make_model(("gated_deltanet", "mlstm"), dim=128, tie_embeddings=False)
    assert m.config.num_branches == 4
    layer, mlp = m.blocks[0].layer, m.blocks[0].mlp
    for module, std in (
        (m.embedding, 0.02),
        (m.head, 0.02),
        (layer.qkv_proj, 0.02),
        (layer.o_proj, 0.01),
        (mlp.gate_up_proj, 0.02),
        (mlp.down_proj, 0.01),
    ):
        assert module.weight.std().item() == pytest.approx(std, rel=0.03)
    assert layer.convolution.short_convolution.weight.abs().max() > 0.45
    gates = m.blocks[1].layer.gates
    assert not gates.weight.any() and gates.bias.max() == 6


# Loss.


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_the_loss_in_pieces_is_pytorchs(ignored):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 213, 8, generator=generator, requires_grad=True)
    w = torch.randn(45, 8, generator=generator, requires_grad=True)
    targets = torch.randint(45, (3, 213), generator=generator)
    if ignored != "none":
        targets[:, 3:9] = 7
    if ignored == "all":
        targets[:] = 7
    index = -100 if ignored == "none" else 7
    ref = F.cross_entropy(
        (x @ w.T).flatten(0, 1), targets.flatten(), ignore_index=index
    ).nan_to_num()
    loss = models.linear_cross_entropy(x, w, targets, index)
    with torch.no_grad():
        without_gradient = models.linear_cross_entropy(x, w, targets, index)
    each = models.token_losses(x, w, targets, index)
    assert each.shape == targets.shape and not each.requires_grad
    count = (targets != index).sum().clamp(min=1)
    assert_agree([loss, without_gradient, each.sum() / count], 3 * [ref])
    expected = torch.autograd.grad(ref, (x, w))
    assert_agree(
        torch.autograd.grad(loss, (x, w)),
        [g.nan_to_num() for g in expected],
    )


def test_the_logits_are_never_there_whole():
    x = torch.randn(1024, 8, requires_grad=True)
    w = torch.randn(400, 8, requires_grad=True)
    with Largest() as largest:
        models.linear_cross_entropy(x, w, torch.arange(1024) % 400).backward()
    assert largest.elements == 256 * 400


@pytest.mark.parametrize("rows", [8, 300])
def test_the_loss_costs_by_its_rows(rows):
    """What is multiplied and added, whatever the vocabulary."""
    x = torch.randn(rows, 8, requires_grad=True)
    w = torch.randn(9000, 8, requires_grad=True)
    targets = torch.arange(rows)
    plain, own = Largest(), Largest()
    with plain:
        F.cross_entropy(x @ w.T, targets).backward()
    with own:
        models.linear_cross_entropy(x, w, targets).backward()
    assert own.total < 3 * plain.total


@torch.no_grad()
def test_attention_costs_by_what_was_read():
    """Not by the room for more: a prompt, and the tokens after it."""
    m = make_model(("softmax",))
    tokens = token_ids(1, 201)
    T = tokens.shape[1]

    def cost(capacity, prompt=False):
        states = m.preallocate_states(1, capacity)
        with Largest() as largest:
            _, states = m(tokens[:, :-1], states)
        if prompt:
            return largest.elements
        with Largest() as largest:
            m(tokens[:, -1:], states)
        return largest.total

    assert cost(T, prompt=True) < (T - 1) ** 2
    assert cost(64 * T) == cost(T)


def test_the_loss_is_fp32_under_autocast():
    x = 10 * torch.randn(30, 16, requires_grad=True)
    w = torch.randn(50, 16, requires_grad=True)
    targets = torch.arange(30)
    with torch.autocast("cpu", torch.bfloat16):
        logits = x @ w.T
        loss = models.linear_cross_entropy(x, w, targets)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    ref = F.cross_entropy(logits.float(), targets)
    assert_agree([loss], [ref])
    found, expected = (torch.autograd.grad(y, (x, w)) for y in (loss, ref))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.01 * b.norm()


def test_a_gradient_of_gradients_is_refused():
    x = torch.randn(3, 4, requires_grad=True)
    loss = models.linear_cross_entropy(x, torch.randn(9, 4), torch.arange(3))
    with pytest.raises(RuntimeError, match="its gradient has no gradient"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_gradients_of_a_mean_are_not_rounded_all_one_way():
    """One over 1,000 is .1 % off in bf16; their rounding has no side."""
    torch.manual_seed(0)
    x, w = torch.randn(1000, 8), torch.randn(20, 8)
    targets = torch.randint(20, (1000,))
    sizes = []
    for dtype in (torch.float64, torch.bfloat16):
        rounded = (t.bfloat16().to(dtype).requires_grad_() for t in (x, w))
        x_, w_ = rounded
        models.linear_cross_entropy(x_, w_, targets).backward()
        sizes.append([t.grad.double().abs().sum() for t in (x_, w_)])
    for exact, found in zip(*sizes, strict=True):
        assert abs(found / exact - 1) < 5e-4


def test_a_documents_last_token_predicts_nothing_of_the_next():
    tokens = torch.arange(1, 7)[None]
    assert models.next_tokens(tokens).tolist() == [[2, 3, 4, 5, 6, -100]]
    offsets = torch.tensor([0, 0, 2, 2, 5, 6])
    found = models.next_tokens(tokens, offsets, -1)
    assert found.tolist() == [[2, -1, 4, 5, -1, -1]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_every_kind(kind):
    """Against all logits; packed, the mean over documents."""
    m, tokens = make_model((kind,)).double(), token_ids(2, 21)
    logits = m(tokens)[0]
    ref = F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:])
    loss = m.loss(tokens)
    assert_agree([loss], [ref])
    assert_agree(gradients(m, m.loss(tokens)), gradients(m, ref))

    packed, offsets = tokens.reshape(1, -1), torch.tensor([0, 21, 30, 42])
    cuts = [packed[:, :21], packed[:, 21:30], packed[:, 30:]]
    ref = sum(m.loss(x) * (x.shape[1] - 1) for x in cuts) / 39
    loss = m.loss(packed, cu_seqlens=offsets)
    assert_agree([loss], [ref])
    assert_agree(gradients(m, loss), gradients(m, ref))


REFUSING = {  # which have a recurrence or a convolution
    *("comba", "deltanet", "gated_deltanet", "gated_deltanet2", "gla"),
    *("kda", "lightning", "mamba"),
    *("mamba2", "mesanet", "mlstm", "recurrence", "retention", "titans"),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_per_sample(kind):
    """By torch.func, or as its refusal says."""
    m, tokens = make_model((kind,), num_layers=1).double(), token_ids(2, 9)
    parameters = dict(m.named_parameters())

    def loss(parameters, row):
        call = torch.func.functional_call
        return call(m, parameters, (row[None],), {"targets": row[None]})

    def of_each():
        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
        return per_sample(parameters, tokens).values()

    if kind in REFUSING:
        with pytest.raises(NotImplementedError, match="a sample at a time"):
            of_each()
        return
    found = [list(g) for g in zip(*of_each(), strict=True)]
    for row, each in zip(tokens, found, strict=True):
        assert_agree(
            each, gradients(m, m.loss(row[None], row[None])), atol=1e-12
        )


# States.


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_every_kind(kind):
    """Pieces give what the whole gives, and states have the bytes said."""
    m, tokens = make_model((kind,)), token_ids(2, 30)
    with torch.no_grad():
        whole, _ = m(tokens)
        first, states = m(tokens[:, :23])
        at = [x.data_ptr() for s in states for x in s.tensors().values()]
        rest = [m(tokens[:, t : t + 1], states)[0] for t in range(23, 30)]
        torch.testing.assert_close(
            torch.cat([first, *rest], 1), whole, rtol=1e-4, atol=1e-5
        )
        if kind != "softmax":
            now = [x.data_ptr() for s in states for x in s.tensors().values()]
            assert now == at
        for T in (1, 23):
            _, states = m(tokens[:1, :T])
            assert m.state_bytes(T) == sum(s.nbytes for s in states)


LONG = {"dtype": torch.int64}
WRONG = """
LanguageModel({})
    TypeError: config: got dict, need a ModelConfig
ModelConfig(9, 8, 2, pattern=None)
    TypeError: pattern: got None, need a tuple of names
ModelConfig.from_json("{")
    ValueError: config: got text that is no JSON, need an object
LanguageModel(m.config, recompute="no")
    TypeError: recompute: got 'no', need True or False
LanguageModel(m.config, dtype=torch.int64)
    TypeError: dtype: got torch.int64, need one of (torch.float64,
    torch.float32, torch.float16, torch.bfloat16)
m(torch.tensor([[71, 3]]))
    ValueError: tokens: got 71, need 0 to 70
m(torch.tensor([[-1, 3]]))
    ValueError: tokens: got -1, need 0 to 70
m([[1, 2]])
    TypeError: tokens: got list, need a Tensor
m(torch.zeros(2, 0, **LONG))
    ValueError: tokens: got shape [2, 0], need [B, T] with B, T >= 1
m(torch.zeros(2, 5, dtype=torch.bool))
    TypeError: tokens: got torch.bool, need torch.int64 or torch.int32
m(token_ids(2, 5), 3)
    TypeError: states: got int, need a list of states
m.loss(token_ids(2, 5), torch.full((2, 5), 71))
    ValueError: targets: got 71, need 0 to 70 or -100
m.token_losses(token_ids(2, 5), torch.full((2, 5), -1))
    ValueError: targets: got -1, need 0 to 70 or -100
m.loss(token_ids(2, 5), torch.randn(2, 5))
    TypeError: targets: got torch.float32, need torch.int64 or torch.int32
m.token_losses(token_ids(2, 5), token_ids(2, 4))
    ValueError: targets: got shape [2, 4], need [2, 5]
m.token_losses(token_ids(2, 5), None)
    TypeError: targets: got NoneType, need a Tensor
m(token_ids(2, 5), targets=token_ids(2, 5), reduction="sum")
    ValueError: reduction: got 'sum', need one of ('mean', 'none')
m.loss(token_ids(2, 5), token_ids(2, 5), ignore_index="x")
    TypeError: ignore_index: got str, need an int
models.linear_cross_entropy(torch.randn(3, 4), torch.randn(5, 3),
torch.zeros(3, **LONG))
    ValueError: head_weight: got shape [5, 3], need [V, 4]
models.linear_cross_entropy(torch.randn(3, 4), torch.randn(5, 4).double(),
token_ids(3) % 5)
    TypeError: head_weight: got torch.float64, need hidden's, torch.float32
models.next_tokens(token_ids(5))
    ValueError: tokens: got shape [5], need [B, T]
m.loss(token_ids(1, 5), cu_seqlens=torch.tensor([0, 6]))
    ValueError: cu_seqlens: got [0, 6], need values that start at 0, never
    decrease and end at T = 5 or before
m(token_ids(1, 4), [None])
    ValueError: states: got 1, need 2, one per
m(token_ids(4))
    ValueError: tokens: got shape [4], need
models.linear_cross_entropy(torch.randn(3, 4), torch.randn(9, 4),
token_ids(2) % 9)
    ValueError: targets: got shape [2], need
m.state_bytes(-4)
    ValueError: T: got -4, need an integer >= 1
m.preallocate_states(0, 3)
    ValueError: num_sequences: got 0, need an integer >= 1
"""


@refused(WRONG)
def test_a_wrong_call_is_named(wrong, error):
    with error():
        eval(wrong, globals() | {"m": make_model(("gla",))})


def test_parameters_and_flops():
    m = make_model(("softmax",), tie_embeddings=True, num_layers=1)
    D, V, W = 32, 71, m.config.mlp_width
    matrices = 4 * D * D + 3 * D * W
    assert m.num_parameters == matrices + V * D + 3 * D
    scores = 2 * 2 * 10 * D
    assert m.flops_per_token(10) == 2 * (matrices + V * D) + scores
    # with gates and a recurrence, which flops.py counts
    m = make_model(("gated_deltanet",))
    assert m.flops_per_token(64) > 2 * (m.num_parameters - 2 * V * D)


# Generation.


def greedy(m, prompt, number):
    with torch.no_grad():
        row = prompt[None]
        for _ in range(number):
            row = torch.cat([row, m(row)[0][:, -1:].argmax(-1)], 1)
    return row[0, len(prompt) :]


@pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
def test_prompts_of_unequal_length_go_on_together(kind):
    m = make_model(HYBRID if kind == "hybrid" else (kind,))
    nn.init.normal_(m.embedding.weight)  # so that tokens differ
    prompts = [token_ids(5), token_ids(19, seed=2), token_ids(1, seed=3)]
    found = m.generate(prompts, 6)
    for prompt, new in zip(prompts, found, strict=True):
        assert new.equal(greedy(m, prompt, 6))


def test_states_stay_where_they_are_while_generating():
    m, places = make_model(("softmax", "gla")), set()

    def look(module, args, output):
        states = args[1]
        places.add(
            tuple(
                x.data_ptr() for s in states for name, x in s.tensors().items()
            )
        )

    m.register_forward_hook(look)
    m.generate([token_ids(3), token_ids(7)], 9)
    assert len(places) == 1


def test_draws():
    m, prompt = make_model(), token_ids(4)

    def draw(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return m.generate(prompt, 20, generator=generator, **options)[0]

    assert draw(0, temperature=1.0).equal(draw(0, temperature=1.0))
    assert not draw(0, temperature=1.0).equal(draw(1, temperature=1.0))
    assert draw(0, temperature=1.0, top_p=1e-6).equal(draw(0))


# Compiling, and computing again.


def test_one_step_of_decoding_compiles():
    """Twice at most: the number of tokens that attention has becomes one."""
    m = make_model()
    nn.init.normal_(m.embedding.weight)
    prompts = [token_ids(5), token_ids(19, seed=2)]
    ref = m.generate(prompts, 12)
    with in_one_graph(m._call_impl, most=2) as run:
        m._compiled_call_impl = run
        for a, b in zip(m.generate(prompts, 12), ref, strict=True):
            assert a.equal(b)


@pytest.mark.gpu
def test_a_compiled_model_writes_on_a_gpu():
    m, prompt = make_model(HYBRID).cuda(), token_ids(19)
    nn.init.normal_(m.embedding.weight)
    (ref,) = m.generate(prompt, 12)
    m.compile(fullgraph=True)
    (found,) = m.generate(prompt, 12)
    assert found.equal(ref)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "pattern, packed, recompute, backend",
    [
        pytest.param(HYBRID, False, True, "aot_eager", id="windows"),
        pytest.param(HYBRID, True, True, "aot_eager", id="packed"),
        pytest.param(HYBRID, False, False, "aot_eager", id="kept", marks=FULL),
        pytest.param(
            HYBRID, True, True, "inductor", id="inductor", marks=FULL
        ),
    ],
)
def test_a_training_step_compiles(pattern, packed, recompute, backend):
    m = make_model(pattern)
    tokens = token_ids(1, 50) if packed else token_ids(2, 25)
    offsets = torch.tensor([0, 7, 31, 50]) if packed else None
    ref = gradients(m, m.loss(tokens, cu_seqlens=offsets))
    m.recompute = recompute
    with in_one_graph(m.loss, backend) as loss:
        assert_agree(gradients(m, loss(tokens, cu_seqlens=offsets)), ref)


class Saved:
    """Elements that autograd keeps."""

    def __init__(self):
        self.elements = 0

    def __enter__(self):
        def pack(x):
            self.elements += x.numel()
            return x

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, id)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)


@pytest.mark.parametrize("kind", ["gated_deltanet", "softmax", "mlstm"])
def test_computing_again_keeps_less_and_changes_nothing(kind):
    m, tokens = make_model((kind,)), token_ids(2, 25)
    ref = gradients(m, m.loss(tokens))
    with Saved() as all_kept:
        m.loss(tokens)
    m.recompute = True
    assert_agree(gradients(m, m.loss(tokens)), ref, atol=0)
    with Saved() as kept:
        m.loss(tokens)
    assert kept.elements < all_kept.elements / 3
    # with the states that come out
    logits, states = m(tokens)
    assert all(state.nbytes for state in states)
    assert_agree(gradients(m, m.loss(tokens)), ref, atol=0)
    logits.sum().backward()


# Files.


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_comes_back_from_its_folder(tied, tmp_path):
    m = make_model(tie_embeddings=tied)
    m.save(tmp_path / "new" / "folder")
    found = models.load(tmp_path / "new" / "folder")
    assert found.config == m.config
    assert found(token_ids(1, 9))[0].equal(m(token_ids(1, 9))[0])
    names = {p.name for p in (tmp_path / "new" / "folder").iterdir()}
    assert names == {"config.json", "model.safetensors"}
    half = models.load(tmp_path / "new" / "folder", dtype=torch.bfloat16)
    assert half.norm.weight.dtype == torch.bfloat16


def test_a_file_keeps_its_dtype_and_its_mode(tmp_path):
    """Both files may be read by whom a new file may be read by."""
    m = make_model().bfloat16()
    m.embedding.float()  # the first in the file
    m.save(tmp_path)
    found = {k: x.dtype for k, x in models.load(tmp_path).state_dict().items()}
    assert found == {k: x.dtype for k, x in m.state_dict().items()}
    (tmp_path / "new").touch()
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1


def test_a_parameter_that_is_not_there_is_not_saved(tmp_path):
    m = make_model()
    m.norm.weight = nn.Parameter(m.norm.weight.to("meta"))
    with pytest.raises(ValueError, match=r"model: got norm.weight as meta"):
        m.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_does_not_fit(tmp_path):
    make_model(tie_embeddings=True).save(tmp_path)
    file = tmp_path / "config.json"
    good = json.loads(file.read_text())
    for changes, said in (
        ({"tie_embeddings": False}, "lacks head.weight"),
        ({"num_layers": 2}, r"has blocks.2.*\(and \d+ more\)"),
        ({"vocab_size": 70}, r"embedding.weight of shape \[71, 32\], need"),
        ({"width": 3}, "config.json: config: got the field 'width'"),
        ({"dim": 0}, "config.json: dim: got 0"),
    ):
        file.write_text(json.dumps(good | changes))
        with pytest.raises(ValueError, match=said):
            models.load(tmp_path)
    del good["dim"]
    file.write_text(json.dumps(good))
    with pytest.raises(ValueError, match="dim: got nothing"):
        models.load(tmp_path)
    file.write_text("{")
    with pytest.raises(
        ValueError, match=r"config\.json: config: got text that is no"
    ):
        models.load(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        models.load(tmp_path)


def test_safetensors_is_asked_for_by_name(monkeypatch, tmp_path):
    inner = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return inner(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install safetensors"):
        make_model().save(tmp_path)
    assert not [*tmp_path.iterdir()]
