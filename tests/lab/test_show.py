"""show() prints the library's own source, and nothing else."""

import sys
from types import SimpleNamespace

import pytest

from fastweights import feature_maps
from fastweights.reference import steps
from fastweights_lab.notebook import show


def test_source_is_the_text_of_the_file():
    assert show.source(steps.linear).startswith("def linear(S: State")
    with open(steps.__file__) as file:
        assert show.source(steps.linear) in file.read()


def test_source_of_a_method_is_dedented():
    text = show.source(feature_maps.RandomFourier.forward)
    assert text.startswith("def forward")


def test_source_of_a_kernel_is_that_of_its_function():
    kernel = SimpleNamespace(fn=steps.read)
    assert show.source(kernel) == show.source(steps.read)


def test_show_names_each_file_once(capsys):
    show.show(steps.outer, steps.read, feature_maps.elu1)
    printed = capsys.readouterr().out
    assert printed.startswith("# fastweights/reference/steps.py\n\ndef outer")
    assert printed.count("# fastweights/reference/steps.py") == 1
    assert printed.count("# fastweights/feature_maps.py") == 1
    for function in (steps.outer, steps.read, feature_maps.elu1):
        assert show.source(function) in printed


def test_show_prints_without_ipython(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    show.show(steps.read)
    assert "def read" in capsys.readouterr().out


def test_show_highlights_in_a_notebook(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.get_ipython", object)
    monkeypatch.setattr("IPython.display.display", shown.append)
    show.show(steps.read)
    [markdown] = shown
    assert markdown.data.startswith("```python\n# fastweights/reference")
    assert markdown.data.endswith("\n```")
    assert show.source(steps.read) in markdown.data


def test_show_needs_something_to_show():
    with pytest.raises(TypeError, match="got no objects"):
        show.show()
