"""Colours that can be read, and figures that follow the page's theme."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
from support.colours import contrast

from fastweights_lab import records
from fastweights_lab.notebook import plotting

mpl.use("Agg")
import matplotlib.pyplot as plt

GROUND = {"light": "#ffffff", "dark": "#14181e"}


@pytest.mark.parametrize("theme", GROUND)
@pytest.mark.parametrize("name", ["q", "k", "v", "S", "ink"])
def test_text_in_the_palette_can_be_read(name, theme):
    colours = plotting.PALETTE[name]
    assert contrast(colours[theme], GROUND[theme]) >= 4.5
    assert contrast(colours["any"], GROUND[theme]) >= 3


def test_palette_has_one_colour_a_symbol():
    for kind in ("light", "dark", "any"):
        colours = [colour[kind] for colour in plotting.PALETTE.values()]
        assert len(set(colours)) == len(colours)


@pytest.fixture
def figure():
    with mpl.rc_context():
        plotting.style()
        fig, ax = plt.subplots()
        ax.plot([0, 1], [0, 1], label="a line")
        ax.fill_between([0, 1], [0, 1], alpha=0.2, color=plotting.STATE)
        ax.set_xlabel("t")
        ax.legend()
        yield fig
    plt.close(fig)


def test_style_draws_with_the_palette_alone(figure):
    svg = plotting.to_svg(figure, "a line")
    for name in ("q", "s", "ink", "grid"):
        assert f"var(--fw-{name}, #" in svg
    assert "#1f77b4" not in svg  # matplotlib's own first colour
    assert "#000000" not in svg


def test_svg_is_one_element_with_a_name(figure):
    alt = 'rises from 0 to 1: "a" < b & c'
    svg = plotting.to_svg(figure, alt)
    root = ET.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("role") == "img"
    assert root.get("aria-label") == alt
    assert root.get("width") is root.get("height") is None
    assert "max-width: 518px" in root.get("style")  # 5.4 inches of 96 pixels
    assert root.get("viewBox")


def test_svg_is_the_same_every_time(figure):
    first = plotting.to_svg(figure, "a line")
    assert plotting.to_svg(figure, "a line") == first


def test_no_two_figures_of_a_page_share_an_id(figure):
    other, ax = plt.subplots()
    ax.plot([0, 1], [0, 1], "o")
    svgs = [plotting.to_svg(f, "a line") for f in (figure, other)]
    plt.close(other)
    ids = [re.findall(r'\bid="([^"]*)"', svg) for svg in svgs]
    assert len({*ids[0], *ids[1]}) == len(ids[0]) + len(ids[1]) > 6
    for svg, own in zip(svgs, ids, strict=True):
        used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', svg)
        assert used and {a or b for a, b in used} <= set(own)


def test_svg_has_text_as_it_was_written_and_styles_once(figure):
    ax = figure.axes[0]
    ax.set_xticks([0.25, 1], ["0.2500", "1.00"])
    svg = plotting.to_svg(figure, "a line")
    assert ">0.2500</text>" in svg and ">1.00</text>" in svg
    rules = re.findall(r"\.(f\w+){(.*?)}", svg)
    assert len(rules) == len({css for _, css in rules}) > 5
    used = set(re.findall(r'class="(f[0-9a-f]+)"', svg))
    assert used == {name for name, _ in rules}
    assert len(svg) < 9_000


DRAW = """\
import matplotlib.pyplot as plt
from fastweights_lab.notebook import plotting
plotting.style()
fig, ax = plt.subplots()
ax.plot([0, 1], [0, 1])
ax.set_title("$x$ of y")
print(plt.get_backend(), plotting.to_svg(fig, "a line"))
"""
USERS = """\
backend: svg
font.family: serif
lines.linestyle: --
savefig.bbox: tight
svg.fonttype: none
text.usetex: True
"""


def test_a_users_matplotlibrc_changes_no_figure(tmp_path):
    drawn = []
    for text in ("backend: svg", USERS):
        (tmp_path / "matplotlibrc").write_text(text)
        run = subprocess.run(
            [sys.executable, "-c", DRAW],
            env=os.environ | {"MATPLOTLIBRC": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        drawn.append(run.stdout)
    assert drawn[0] == drawn[1] and drawn[0].startswith("svg <svg")


@pytest.mark.parametrize(
    "shares, count", [({}, 2), ({"sharey": True}, 0), ({"legend": True}, 0)]
)
def test_panels_that_share_nothing_can_be_parted(shares, count):
    legend = shares.pop("legend", False)
    fig, axes = plt.subplots(2, 2, **shares, layout="constrained")
    for ax in axes.flat:
        ax.plot([0, 1], label="a line")
    if legend:
        fig.legend()
    svg = plotting.to_svg(fig, "four lines")
    columns = plotting.panels(fig)
    assert len(columns) == count
    assert (f'data-panels="{columns}"' in svg) == (count > 0)
    ends = [x for column in columns for x in column]
    assert ends == sorted(ends) and all(0 <= x <= 72 * 6.4 for x in ends)


def test_svg_needs_a_description(figure):
    with pytest.raises(ValueError, match="alt: got an empty string"):
        plotting.to_svg(figure, "  ")


def test_draw_without_ipython_closes_the_figure(figure, capsys):
    plotting.draw(figure, "a line")
    assert figure.number not in plt.get_fignums()
    assert capsys.readouterr().out == ""


def test_draw_shows_the_svg_in_a_notebook(figure, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.get_ipython", object)
    monkeypatch.setattr("IPython.display.display", shown.append)
    svg = plotting.to_svg(figure, "a line")
    plotting.draw(figure, "a line")
    assert [html.data for html in shown] == [svg]
    assert figure.number not in plt.get_fignums()


@pytest.fixture
def record():
    """The recorded run, its peer's times twice our own."""
    found = records.load("h200_members")
    ours = [row for row in found["rows"] if row.get("who") != "fla"]
    slower = [
        row | {"who": "fla", "seconds": 2 * row["seconds"]}
        for row in ours
        if "gate" in row
    ]
    return found | {"rows": ours + slower}


def points(ax, colour):
    """Where the marks of a colour lie, in order."""
    lines = [
        x
        for x in ax.lines
        if x.get_color() == colour and x.get_marker() != "None"
    ]
    return sorted(
        xy for line in lines for xy in zip(*line.get_data(), strict=True)
    )


def test_times_against_the_floor(record):
    fig = plotting.against_floor(record, "long")
    forward, both = fig.axes
    names = [label.get_text() for label in forward.get_yticklabels()]
    assert names[0] == "linear attention" and names[-1] == "kda"
    (slowest,) = (
        r["seconds"] / r["floor"]
        for r in record["rows"]
        if r.get("member") == "kda"
        and r.get("shape") == "long"
        and r.get("gate") == "kept"
        and r["what"] == "forward+backward"
        and r["who"] == "fastweights"
    )
    assert (slowest, 6) in points(both, plotting.QUERY)
    assert (2 * slowest, 6) in points(both, plotting.KEY)
    assert len(points(forward, plotting.QUERY)) == len(names) == 7
    plt.close(fig)


def test_a_shape_that_was_not_measured(record):
    with pytest.raises(ValueError, match=r"shape: got 'wide', need one of"):
        plotting.against_floor(record, "wide")
