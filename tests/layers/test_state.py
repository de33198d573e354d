"""States: moved, copied, chosen, changed in place, and refused."""

import pytest
import torch
from support.layer_cases import LAYER_CASES, contents, hidden, make_layer
from support.pairwise import parametrize_all
from support.refused import refused

from fastweights.layers import (
    MLSTM,
    GatedDeltaNet,
    LaCT,
    LayerState,
    SoftmaxAttention,
    TTTLinear,
)

SOFTMAX = [name for name in LAYER_CASES if name.startswith("softmax")]
OTHERS = [name for name in LAYER_CASES if name not in SOFTMAX]


@torch.no_grad()
def make_layer_and_state(name, *shape, seed=0):
    layer = make_layer(name)
    return layer, layer(hidden(*shape, seed=seed))[1]


def addresses(state):
    return {k: t.data_ptr() for k, t in state.tensors().items()}


def are_equal(a, b):
    a, b = contents(a), contents(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@parametrize_all(name=OTHERS, length=[1, 5, 20])
def test_in_place_without_gradients(name, length):
    layer, state = make_layer_and_state(name, 2, 5)
    before, where = state.clone(), addresses(state)
    with torch.no_grad():
        _, found = layer(hidden(2, length), state)
    assert found is state and addresses(state) == where
    assert not are_equal(state, before)


@parametrize_all(name=list(LAYER_CASES), length=[1, 20])
def test_a_new_one_with_gradients(name, length):
    layer, state = make_layer_and_state(name, 2, 5)
    before = state.clone()
    _, found = layer(hidden(2, length), state)
    assert are_equal(state, before) and found is not state
    assert not set(addresses(found).values()) & set(addresses(state).values())
    assert any(t.requires_grad for t in found.tensors().values())
    assert not any(t.requires_grad for t in found.detach().tensors().values())


@pytest.mark.parametrize("name", SOFTMAX)
def test_room_is_left_alone_with_gradients(name):
    layer = make_layer(name)
    state = layer.preallocate_state(2, 32)
    with torch.no_grad():
        layer(hidden(2, 5), state)
    before = state.clone().tensors()
    y, _ = layer(hidden(2, 3), state)
    y.sum().backward()
    assert all(torch.equal(t, before[k]) for k, t in state.tensors().items())


@pytest.mark.parametrize("name", LAYER_CASES)
def test_moved_and_cloned(name):
    _, state = make_layer_and_state(name, 2, 5)
    assert are_equal(state.to("cpu"), state)
    away = state.to("meta").tensors()
    assert all(t.is_meta for t in away.values())
    copied = state.clone()
    assert are_equal(copied, state) and state in [copied, state]
    assert state != copied and len({state, copied}) == 2
    assert copied.read_at_most == state.read_at_most
    assert not set(addresses(copied).values()) & set(addresses(state).values())
    for t in copied.tensors().values():
        t.zero_()
    assert not are_equal(copied, state)
    size = sum(t.numel() * t.itemsize for t in state.tensors().values())
    assert state.nbytes == size > 0


@torch.no_grad()
@pytest.mark.parametrize("name", LAYER_CASES)
def test_selected_rows_go_on(name):
    """One of them twice, as in a beam search."""
    layer, state = make_layer_and_state(name, 3, 5)
    x, rows = hidden(3, 2, seed=1), torch.tensor([2, 0, 2])
    chosen = state.select(rows)
    want, _ = layer(x, state)
    y, chosen = layer(x[rows], chosen)
    torch.testing.assert_close(y, want[rows])
    torch.testing.assert_close(contents(chosen), contents(state.select(rows)))


@torch.no_grad()
@pytest.mark.parametrize("name", LAYER_CASES)
def test_rows_copied_in(name):
    """Two of three sequences end, and others take their places."""
    _, state = make_layer_and_state(name, 3, 5)
    _, new = make_layer_and_state(name, 2, 5, seed=1)
    where, rows = addresses(state), torch.tensor([2, 0])
    middle = state.select(torch.tensor([1]))
    state.copy_(new, rows.int())
    assert addresses(state) == where
    assert are_equal(state.select(rows), new)
    assert are_equal(state.select(torch.tensor([1])), middle)
    whole = make_layer_and_state(name, 3, 5, seed=2)[1]
    state.copy_(whole)
    assert are_equal(state, whole) and addresses(state) == where


@torch.no_grad()
@pytest.mark.parametrize("name", SOFTMAX)
def test_rows_copied_into_more_room(name):
    layer = make_layer(name)
    state = layer.preallocate_state(3, 32)
    prompts = [hidden(1, n, seed=n) for n in (4, 9, 6)]
    for n, prompt in enumerate(prompts):
        state.copy_(layer(prompt)[1], torch.tensor([n]))
    assert state.read_at_most == 9 and state.num_read.tolist() == [4, 9, 6]
    more, where = hidden(3, 2, seed=1), addresses(state)
    y, _ = layer(more, state)
    assert addresses(state) == where
    for n, prompt in enumerate(prompts):
        whole, _ = layer(torch.cat([prompt, more[n : n + 1]], 1))
        torch.testing.assert_close(y[n : n + 1], whole[:, -2:])
    short = layer.preallocate_state(1, 3)
    with pytest.raises(ValueError, match=r"other: got keys of shape \[1, 4"):
        short.copy_(layer(prompts[0])[1])


@torch.no_grad()
def test_softmax_grows():
    layer = make_layer("softmax")
    x = hidden(2, 40)
    want, _ = layer(x)
    state, outputs, sizes = None, [], []
    for part in x.split(1, 1):
        y, state = layer(part, state)
        outputs.append(y)
        sizes.append(state.keys.shape[1])
    torch.testing.assert_close(torch.cat(outputs, 1), want)
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 64]
    assert state.read_at_most == 40 and state.num_read.tolist() == [40, 40]


@torch.no_grad()
def test_softmax_stays_where_there_is_room():
    layer = make_layer("softmax-options")
    state = layer.preallocate_state(2, 40)
    assert state.nbytes == 2 * 2 * 40 * 2 * 4 * 4 + 2 * 8
    where, x, outputs = addresses(state), hidden(2, 40), []
    for part in x.split([7, 1, 20, 12], 1):
        y, found = layer(part, state)
        assert found is state and addresses(state) == where
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x)[0])
    layer(x[:, :1], state)
    assert addresses(state)["keys"] != where["keys"]
    half = layer.preallocate_state(1, 3, dtype=torch.bfloat16, device="meta")
    assert half.keys.dtype == torch.bfloat16 and half.values.is_meta


@torch.no_grad()
def test_softmax_counts_a_packs_tokens_by_sequence():
    """A row with 8 tokens goes on by one, beside a prompt of 6."""
    layer, x = make_layer("softmax"), hidden(1, 20)
    state = layer.preallocate_state(2, 10)
    layer(x[:, :8], state, torch.tensor([0, 8, 8]))
    where = addresses(state)
    for n in (8, 9):
        state.num_read[1] = 0
        y, _ = layer(x[:, n : n + 8], state, torch.tensor([0, 1, 7]))
        torch.testing.assert_close(y[:, 0], layer(x[:, : n + 1])[0][:, n])
        ref = layer(x[:, n + 1 : n + 7])[0]
        torch.testing.assert_close(y[:, 1:7], ref)
        assert addresses(state) == where and state.read_at_most == n + 1
    layer(x[:, :2], state, torch.tensor([0, 1, 2]))
    assert state.keys.shape[1] == 20
    state = layer.preallocate_state(2, 12)
    layer(x[:, :5], state, torch.tensor([0, 5, 5]))
    for n in (5, 6):
        state.num_read[1] = 0
        layer(x[:, n : n + 7], state, torch.tensor([0, 1, 7]))
    where = addresses(state)
    y, _ = layer(x[:, 7:9].expand(2, -1, -1), state)
    torch.testing.assert_close(y[:1], layer(x[:, :9])[0][:, 7:])
    assert addresses(state) == where and state.read_at_most == 9


@torch.no_grad()
def test_a_state_of_another_dtype_than_the_layer():
    layer = make_layer("softmax")
    state = layer.preallocate_state(2, 8, dtype=torch.bfloat16)
    y, _ = layer(hidden(2, 5), state)
    assert state.keys.dtype == torch.bfloat16
    torch.testing.assert_close(y, layer(hidden(2, 5))[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", LAYER_CASES)
@pytest.mark.parametrize("first", [True, False], ids=["made", "used"])
def test_made_or_used_under_autocast(name, first):
    """In place it keeps its dtypes, and S is never narrow."""

    def mode(on):
        return torch.autocast("cpu", torch.bfloat16, enabled=on)

    layer, x, more = make_layer(name), hidden(2, 9), hidden(2, 3, seed=1)
    with torch.no_grad():
        with mode(first):
            _, state = layer(x)
        kinds = {k: t.dtype for k, t in state.tensors().items()}
        ref = layer(more, layer(x)[1])[0]
        with mode(not first):
            y, after = layer(more, state.clone())
    assert (y - ref).norm() < 0.06 * ref.norm()
    assert {k: t.dtype for k, t in after.tensors().items()} == kinds
    assert {kinds.get("S"), kinds.get("m")} <= {None, torch.float32}
    with mode(not first):
        again, after = layer(more, state)
    assert (again - y).norm() < 0.02 * ref.norm()


@pytest.mark.parametrize("name", LAYER_CASES)
@pytest.mark.parametrize("gradients", [False, True])
def test_made_in_inference_mode_and_continued_outside(name, gradients):
    layer, x, more = make_layer(name), hidden(2, 9), hidden(2, 3, seed=1)
    with torch.no_grad():
        ref, after_ref = layer(more, layer(x)[1])
    with torch.inference_mode():
        _, state = layer(x)
    with torch.set_grad_enabled(gradients):
        y, after = layer(more, state)
    torch.testing.assert_close(y, ref)
    torch.testing.assert_close(contents(after), contents(after_ref))
    assert (after is state) != gradients and y.requires_grad == gradients
    with torch.inference_mode():
        layer(more, state)


@torch.no_grad()
def test_rows_of_a_pool_made_in_inference_mode():
    """They cannot change, and a copy would be no pool."""
    layer = make_layer("gated-deltanet")
    with torch.inference_mode():
        _, state = layer(hidden(3, 5))
    rows = torch.tensor([2, 0])
    with pytest.raises(ValueError, match="need one that was not, or that"):
        layer(hidden(2, 1), state.as_pool(rows, 5))
    layer(hidden(2, 1), state.clone().as_pool(rows, 5))


@pytest.mark.parametrize("gradients", [False, True])
def test_the_state_of_another_layer(gradients):
    """Told before anything of it is changed."""
    with torch.set_grad_enabled(gradients):
        for name, other in (
            ("gated-deltanet", "lightning"),
            ("lightning", "gated-deltanet"),
            ("retnet", "lightning"),
            ("mlstm", "softmax"),
            ("softmax", "retnet"),
            ("mamba", "mlstm"),
            ("gla", "gla-conv"),
        ):
            layer, (_, state) = (
                make_layer(name),
                make_layer_and_state(other, 2, 5),
            )
            before = state.clone()
            with pytest.raises(ValueError, match="of another layer"):
                layer(hidden(2, 3), state)
            assert are_equal(state, before)


def test_a_state_with_other_rows():
    for name in LAYER_CASES:
        layer, state = make_layer_and_state(name, 3, 5)
        with pytest.raises(ValueError, match="need 2 rows, one per sequence"):
            layer(hidden(2, 3), state)
        with pytest.raises(ValueError, match="need 2 rows, one per sequence"):
            layer(hidden(1, 3), state, torch.tensor([0, 1, 3]))


def test_what_is_no_state():
    for state in ((torch.zeros(1),), torch.zeros(1), {}):
        kind = type(state).__name__
        with pytest.raises(TypeError, match=f"state: got {kind}, need a Lay"):
            make_layer("gla")(hidden(2, 3), state)


def test_copies_that_do_not_fit():
    _, state = make_layer_and_state("gated-deltanet", 2, 5)
    with pytest.raises(ValueError, match="other: got a state with"):
        state.copy_(make_layer_and_state("gla", 2, 5)[1])
    with pytest.raises(ValueError, match=r"other: got S of shape \[3, 2"):
        state.copy_(make_layer_and_state("gated-deltanet", 3, 5)[1])
    with pytest.raises(ValueError, match=r"need \[1, 2"):
        state.copy_(
            make_layer_and_state("gated-deltanet", 2, 5)[1], torch.tensor([0])
        )
    with pytest.raises(ValueError, match="need num_read"):
        LayerState(S=torch.zeros(1)).batch_field("num_read")


def test_an_empty_state_is_a_start():
    layer = make_layer("softmax")
    assert isinstance(layer, SoftmaxAttention)
    x = hidden(2, 5)
    y, _ = layer(x, layer.preallocate_state(2, 5))
    torch.testing.assert_close(y, layer(x)[0])


OF_OTHER_SIZES = {
    "heads": ("gated-deltanet", lambda: GatedDeltaNet(8, 2, 2), "S"),
    "taps": (
        "gated-deltanet",
        lambda: GatedDeltaNet(8, 2, 4, conv_size=2),
        "convolution",
    ),
    "keys": ("softmax", lambda: SoftmaxAttention(8, 4), "keys"),
    "network": ("ttt-linear", lambda: TTTLinear(8, 4), "S"),
    "window": ("lact", lambda: LaCT(8, 2, chunk_size=4), "window"),
    "units": ("mlstm", lambda: MLSTM(8, 1), "[Sm]"),
}


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("case", OF_OTHER_SIZES)
def test_the_state_of_a_layer_of_another_size(case, length):
    """Named as the state, before anything of it is changed; rows too."""
    name, other, field = OF_OTHER_SIZES[case]
    _, state = make_layer_and_state(name, 3, 5)
    before = state.clone()
    said = f"^state: got {field} of shape .*, need .*: is it the state of an"
    with pytest.raises(ValueError, match=said):
        other()(hidden(3, length), state)
    with pytest.raises(ValueError, match=said):
        other()(hidden(2, length), state.as_pool(torch.tensor([2, 0]), 5))
    assert are_equal(state, before)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "field", "dtype", "need"),
    [
        ("gated-deltanet", "S", torch.float16, torch.float32),
        ("gated-deltanet", "S", torch.float64, torch.float32),
        ("mlstm", "m", torch.bfloat16, torch.float32),
        ("softmax", "num_read", torch.float32, torch.int64),
        ("ttt-linear", "num_read", torch.int32, torch.int64),
        ("softmax", "keys", torch.int64, torch.float64),
    ],
)
@pytest.mark.parametrize("length", [1, 20])
def test_a_state_of_another_dtype(name, field, dtype, need, length):
    layer, state = make_layer_and_state(name, 2, 5)
    setattr(state, field, getattr(state, field).to(dtype))
    with pytest.raises(TypeError, match=f"state: got {field} in {dtype}, nee"):
        layer(hidden(2, length), state)
    setattr(state, field, getattr(state, field).to("meta", need))
    with pytest.raises(ValueError, match=f"got {field} on meta, need x's, c"):
        layer(hidden(2, length), state)


@torch.no_grad()
@refused("""
s.as_pool([0, 1], 0)
    TypeError: rows: got list, need a Tensor
s.as_pool(torch.ones(2), 0)
    TypeError: rows: got torch.float32, need torch.int32 or torch.int64
s.as_pool(tensor([1, 1]), 0)
    ValueError: rows: got [1, 1], need each row once
s.as_pool(tensor([1]), -5)
    ValueError: read_at_most: got -5, need an integer >= 0
s.as_pool(tensor([1]), 0.5)
    TypeError: read_at_most: got float, need an int
s.select([0])
    TypeError: rows: got list, need a Tensor
s.select(tensor([0, 3]))
    ValueError: rows: got [0, 3], need sequences, 0 to 2
s.select(tensor([-1]))
    ValueError: rows: got [-1], need sequences, 0 to 2
LayerState().select(tensor([0]))
    ValueError: state: got one with no field, need a layer's
LayerState().num_rows
    ValueError: state: got one with no field, need a layer's
s.copy_(3)
    TypeError: other: got int, need a LayerState
s.copy_(s, tensor([0, 0, 1]))
    ValueError: rows: got [0, 0, 1], need each row once
s.copy_(s, tensor([0, 1, 3]))
    ValueError: rows: got [0, 1, 3], need rows of the pool, 0 to 2
""")
def test_rows_that_are_none(wrong, error):
    _, s = make_layer_and_state("gated-deltanet", 3, 5)
    with error():
        names = {"torch": torch, "tensor": torch.tensor}
        eval(wrong, names | {"s": s, "LayerState": LayerState})


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated-deltanet", "softmax", "mlstm"])
def test_rows_of_a_pool_for_other_sequences(name):
    layer, state = make_layer_and_state(name, 3, 5)
    for count in (1, 3):
        rows = torch.arange(count)
        with pytest.raises(ValueError, match=rf"rows: got shape \[{count}\]"):
            layer(hidden(2, 1), state.as_pool(rows, 5))
