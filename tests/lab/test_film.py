"""The film: its element, what it refuses, and the arithmetic it runs."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib import resources

import matplotlib as mpl
import pytest
import torch
from bs4 import BeautifulSoup
from support.inputs import RULES as ALL_RULES

from fastweights.reference import steps
from fastweights_lab.notebook import film

RULES = ALL_RULES[:2]

SCRIPT = resources.files("fastweights_lab.notebook.film") / "film.js"
CODE = resources.files("fastweights_lab.notebook.film") / "film_code.js"
GATES = ("none", "head", "channel")
T, K, V = 7, 4, 3
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="needs node")


def inputs(gate="none", rule="additive", seed=0):
    """Keys of many lengths, as nothing here may need unit ones."""
    torch.manual_seed(seed)
    x = {
        "k": torch.randn(T, K, dtype=torch.float64),
        "v": torch.randn(T, V, dtype=torch.float64),
    }
    if gate != "none":
        size = (T,) if gate == "head" else (T, K)
        x["g"] = -torch.rand(size, dtype=torch.float64)
    if rule == "delta":
        x["beta"] = torch.rand(T, dtype=torch.float64)
    return x


def to_html(alt="A film of a state", moments=(2, 4, 7), **more):
    x = inputs("head") | more
    return film.to_html(**x, alt=alt, moments=moments)


def root(text):
    (element,) = BeautifulSoup(text, "html.parser").select(".fw-film")
    return element


class Balance(HTMLParser):
    """Every element is closed, and in its order; SVG may close itself."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), tag
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert "svg" in self.open

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rule", RULES)
def test_it_is_one_well_formed_element(gate, rule):
    x = inputs(gate, rule)
    text = film.to_html(**x, alt="a < b", caption="c & d", moments=(1, T))
    balance = Balance()
    balance.feed(text)
    assert not balance.open
    element = root(text)
    assert element.name == "figure"
    assert text.startswith("<figure") and text.endswith("</figure>")
    assert element.figcaption.text == "c & d"
    live = element.select_one(".fw-film-live")
    assert live.has_attr("hidden") and live["aria-label"] == "a < b"
    ET.fromstring(str(element.select_one(".fw-film-still svg")))


def titles_of(still):
    """The tokens that the titles of its panels name."""
    return re.findall(r">after token (\d+)<", str(still))


def test_a_still_with_words_stands_where_no_script_runs():
    alt = 'it says "a" < b & c'
    svg = root(to_html(alt)).select_one(".fw-film-still > svg")
    assert svg["role"] == "img"
    assert svg["aria-label"].startswith(
        alt + " Stills after tokens 2, 4 and 7. "
    )
    assert "var(--fw-s, #" in str(svg)
    assert len(titles_of(svg)) == 3


@pytest.mark.parametrize("moments", [(1,), (2, 3, 6), range(2, 8)])
def test_moments_are_the_stills_panels(moments):
    svg = root(to_html(moments=moments)).select_one(".fw-film-still > svg")
    assert titles_of(svg) == [*map(str, moments)]
    assert len(svg.select("use")) == sum(moments)  # bars


@pytest.mark.parametrize(
    "moments, told",
    [
        (
            (1, 3, 5),
            "Stills after tokens 1, 3 and 5. Values of which the state then "
            "answers more than half: 1; 1 to 3; 2, 3 and 5.",
        ),
        ((2,), "Still after token 2. Values of which the state then"),
    ],
    ids=str,
)
def test_the_alt_tells_the_stills_that_are_drawn(moments, told):
    """Orthogonal keys, and token 4 writes nothing over the key of 1."""
    x = {"k": torch.eye(4)[[0, 1, 2, 0, 3, 1]], "v": torch.eye(6)}
    x["v"][3] = 0
    x["beta"] = torch.ones(6)
    still = root(film.to_html(**x, alt="A film", moments=moments))
    label = still.select_one(".fw-film-still svg")["aria-label"]
    assert told in label
    named = re.findall(r"\d+", label.partition("after ")[2].split(".")[0])
    assert titles_of(still) == named


def test_the_stills_bars_stand_for_the_tokens_so_far():
    one, all_ = (root(to_html(moments=(t,))).select("use") for t in (1, T))
    assert len(all_) - len(one) == T - 1


def test_ids_are_the_same_every_time_and_differ_between_films():
    first = to_html()
    assert to_html() == first
    others = [
        to_html("Another film"),
        to_html(caption="c"),
        to_html(decay_slider=False),
        to_html(moments=(2,)),
        to_html(g=None),
        to_html(beta=torch.rand(T)),
    ]
    names = [root(text)["id"] for text in [first, *others]]
    assert len(set(names)) == len(names)
    for text, name in zip([first, *others], names, strict=True):
        assert f'begin("{name}");' in text
        inside = [tag["id"] for tag in root(text).find_all(id=True)]
        assert all(x.startswith(f"{name}-") for x in inside)


def test_no_two_elements_of_a_page_share_an_id():
    page = to_html() + to_html("Another film")
    found = BeautifulSoup(page, "html.parser").find_all(id=True)
    ids = [tag["id"] for tag in found]
    assert len(set(ids)) == len(ids)
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', page))
    assert used <= set(ids)


def test_it_neither_needs_nor_leaves_a_style():
    first = to_html()
    with mpl.rc_context({"font.size": 20, "svg.hashsalt": None}):
        before = dict(mpl.rcParams)
        assert to_html() == first
        assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rule", RULES)
def test_the_page_carries_the_tensors_to_four_digits(gate, rule):
    x = inputs(gate, rule)
    data = carried(x)
    assert list(data) == ["k", "v", "g", "beta"]
    for name, found in data.items():
        if name not in x:
            assert found is None
            continue
        found = torch.tensor(found, dtype=torch.float64)
        assert found.shape == x[name].shape
        assert torch.allclose(found, x[name], rtol=5.1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_floating_point_with_or_without_grad(dtype):
    x = {name: y.to(dtype) for name, y in inputs("channel", "delta").items()}
    x["k"].requires_grad_()
    found = torch.tensor(carried(x)["k"], dtype=torch.float64)
    assert torch.allclose(found, x["k"].detach().double(), rtol=5.1e-4)


def test_the_largest_and_the_smallest():
    k, v = torch.randn(64, 16), torch.randn(64, 16)
    x = (k, v, -torch.rand(64, 16), torch.rand(64))
    text = film.to_html(*x, alt="large", moments=range(57, 65))
    assert len(text) < 550_000
    x = torch.zeros(1, 1), torch.zeros(1, 1)
    film.to_html(*x, alt="nothing at all", moments=(1,))


@pytest.mark.parametrize("slider", [True, False])
def test_the_callers_choice_of_slider_is_carried(slider):
    carried = root(to_html(decay_slider=slider))["data-decay"]
    assert carried == str(slider).lower()


@pytest.mark.parametrize("moments", [(7,), (2, 3, 6), range(3, 8)])
def test_it_opens_at_the_first_of_the_stills(moments):
    assert root(to_html(moments=moments))["data-opens"] == str(moments[0])


@pytest.mark.parametrize(
    "bad, message",
    [
        (
            {"k": torch.ones(65, K), "v": torch.ones(65, V), "g": None},
            "k, v: got T 65, K 4 and V 3, need T <= 64, and K and V <= 16",
        ),
        ({"k": torch.ones(T, 17)}, "k, v: got T 7, K 17 and V 3, need"),
        ({"g": torch.full((T,), -torch.inf)}, "g: got inf or nan, need"),
        ({"v": torch.full((T, V), torch.nan)}, "v: got inf or nan, need"),
        ({"alt": " "}, "alt: got an empty string, need a description"),
        ({"alt": "S after token 6", "moments": (1, 7)}, "alt: got '6', need"),
        ({"alt": "after tokens 1, 6 and 7", "moments": (1, 7)}, "alt: got '1"),
        ({"moments": (0, 7)}, "moments: got (0, 7), need tokens from 1 to 7"),
        ({"moments": (7, 8)}, "moments: got (7, 8), need tokens from 1 to 7"),
        ({"moments": ()}, "moments: got (), need tokens from 1 to 7"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(bad, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        to_html(**bad)


def test_show_displays_the_film_in_a_notebook_alone(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    x = inputs() | {"alt": "a", "caption": "c", "moments": (7,)}
    film.show(**x)
    assert not shown and capsys.readouterr().out == ""
    monkeypatch.setattr("IPython.get_ipython", object)
    film.show(**x)
    assert [html.data for html in shown] == [film.to_html(**x)]


def test_the_script_is_small_and_asks_for_nothing():
    code = SCRIPT.read_text("utf-8")
    assert len(code.encode()) < 20_000
    python = CODE.read_text("utf-8")
    assert len(python.encode()) < 3_000
    assert "://" not in python
    code += python.replace("import torch\\nimport fastweights as fw", "")
    assert "</script" not in code.lower()
    assert re.findall(r"https?://[^\"]*", code) == [
        "http://www.w3.org/2000/svg"
    ]
    network = r"fetch\(|XMLHttp|WebSocket|import\b|EventSource|sendBeacon|src="
    assert not re.search(network, code)
    style = root(to_html()).style.text
    assert "url(" not in style and "@import" not in style


def node(call, **arguments):
    """What `call` gives, in node, of film.js as `film` and the arguments.

    `call` may also be a call of `code`, that of film_code.js.
    """
    return torch.tensor(said(call, **arguments), dtype=torch.float64)


def said(call, **arguments):
    """The same as it is: a string, say."""
    names = ", ".join(arguments)
    code = (
        "const film = require(process.argv[1]);"
        "const {code} = require(process.argv[2]);"
        f"const {{{names}}} = JSON.parse(require('fs').readFileSync(0));"
        f"console.log(JSON.stringify({call}))"
    )
    ran = subprocess.run(
        ["node", "-e", code, str(SCRIPT), str(CODE)],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


def states_of(x):
    """The states S_0, ..., S_T of `steps.recurrence`: [T + 1, K, V]."""
    S = torch.zeros(K, V, dtype=torch.float64)
    states = [S]
    for t in range(T):
        g = x["g"][t].reshape(-1) if "g" in x else None
        beta = x["beta"][t] if "beta" in x else None
        S, _ = steps.recurrence(S, x["k"][t], x["k"][t], x["v"][t], g, beta)
        states.append(S)
    return torch.stack(states)


def as_data(x):
    names = ("k", "v", "g", "beta")
    return {n: x[n].tolist() if n in x else None for n in names}


def carried(x):
    """The film's data as its page carries it."""
    return json.loads(
        root(film.to_html(**x, alt="a", moments=(1,)))["data-film"]
    )


@needs_node
@pytest.mark.parametrize("t", [0, 5])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", [None, 0.7])
def test_the_code_on_the_page_makes_the_state_on_screen(gate, rule, decay, t):
    """The listing runs by itself, and its S is the script's."""
    data = carried(inputs(gate, rule))
    both = "[code(data, decay, t), film.run(data, decay)[t]]"
    listing, screen = said(both, data=data, decay=decay, t=t)
    assert max(map(len, listing.splitlines())) <= 79
    names = {}
    exec(listing, names)
    assert names["S"].shape == (K, V)
    assert (names["S"] - torch.tensor(screen)).abs().max() < 1e-5


@needs_node
def test_the_code_has_floats_where_the_page_has_whole_numbers():
    """A tensor of integers is none that the library takes."""
    x = {"k": torch.eye(3), "v": 2 * torch.eye(3), "beta": torch.ones(3)}
    names = {}
    exec(said("code(data, 1, 3)", data=carried(x)), names)
    assert torch.equal(names["S"], 2 * torch.eye(3))


@needs_node
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", [None, 0.7, 1.0])
def test_the_scripts_states_are_the_references(gate, rule, decay):
    x = inputs(gate, rule)
    made = node("film.run(data, decay)", data=as_data(x), decay=decay)
    if decay is not None:
        x["g"] = torch.full((T,), decay, dtype=torch.float64).log()
    assert (made - states_of(x)).abs().max() < 1e-9


@needs_node
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rule", RULES)
def test_bars_are_shares_of_the_value_in_the_answer(gate, rule):
    x = inputs(gate, rule)
    S = states_of(x)[-1]
    made = node(
        "data.k.map((k, j) => film.share(S, k, data.v[j]))",
        S=S.tolist(),
        data=as_data(x),
    )
    k, v = x["k"], x["v"]
    queries = k / k.square().sum(-1, keepdim=True)
    expected = ((queries @ S) * v).sum(-1) / v.square().sum(-1)
    assert (made - expected).abs().max() < 1e-9
    assert (film.shares(**x)[-1] - expected).abs().max() < 1e-9


@needs_node
@pytest.mark.parametrize("gate", GATES)
def test_lines_are_what_decay_left(gate):
    """Alone in the state, a token's share is what decay left of it."""
    x = inputs(gate)
    made = node(
        "data.k.map((_, j) => film.left(data, null, j, data.k.length))",
        data=as_data(x),
    )
    for j in range(T):
        alone = x | {"v": torch.zeros(T, V, dtype=torch.float64)}
        alone["v"][j] = x["v"][j]
        answer = steps.read(states_of(alone)[-1], x["k"][j])
        expected = answer @ x["v"][j]
        expected /= x["k"][j].square().sum() * x["v"][j].square().sum()
        assert abs(made[j] - expected) < 1e-9
    assert (film.lines(x["k"], x.get("g"))[-1] - made).abs().max() < 1e-9
    if gate == "head":
        after = x["g"].flip(0).cumsum(0).flip(0) - x["g"]
        assert (made - after.exp()).abs().max() < 1e-9


@needs_node
def test_zero_keys_and_values_give_zero_shares():
    zero = {"k": [[0.0] * K], "v": [[0.0] * V], "g": None, "beta": None}
    made = node(
        "[film.share(film.run(data, null)[1], data.k[0], data.v[0]), "
        "film.left(data, null, 0, 1)]",
        data=zero,
    )
    assert made.tolist() == [0, 0]
