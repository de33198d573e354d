"""The map of the family: each layer in its cell, and in words."""

import re
from pathlib import Path

import matplotlib as mpl
import pytest

from fastweights_lab.notebook import family, plotting

mpl.use("Agg")
import matplotlib.pyplot as plt

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"


@pytest.mark.parametrize("name, chapter", [x[:2] for x in family.LAYERS])
def test_a_layer_stands_in_its_chapter(name, chapter):
    (page,) = CHAPTERS.glob(f"{chapter:02}_*.md")
    assert re.search(rf"\b{name}\b", page.read_text("utf-8"), re.I)


def test_a_name_stays_in_its_cell():
    plotting.style()
    fig = family.family_map()
    fig.canvas.draw()
    (ax,) = fig.axes
    edges = [left for left, _ in family.STORED.values()] + [family.WIDTH]
    to_data = ax.transData.inverted()
    names = {name for name, *_ in family.LAYERS}
    for text in [x for x in ax.texts if x.get_text() in names]:
        box = text.get_window_extent().transformed(to_data)
        end = min(edge for edge in edges if edge > box.x0)
        assert box.x1 < end, text.get_text()
    plt.close(fig)
