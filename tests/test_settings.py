"""Where launch settings that were measured on this machine are kept."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

import fastweights as fw
from fastweights.kernels import settings, tune

OPTIONS = {"BV": 64, "num_warps": 4}
ROW = {"launch": "scan", "member": "kda", "shape": "train", "seconds": 1.0}


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """A place for the user's table where none is yet."""
    file = tmp_path / "somewhere" / "launch.json"
    monkeypatch.setenv("FASTWEIGHTS_LAUNCH", str(file))
    settings.launch_table.cache_clear()
    yield file
    settings.launch_table.cache_clear()


def test_tuning_writes_outside_the_package(tuned):
    """And the library finds it at once, no process anew."""
    assert "X" not in settings.launch_table()
    assert settings.tuned_table() == tuned
    tune.write([ROW | OPTIONS | {"own": True}], "X", settings.tuned_table())
    assert json.loads(tuned.read_text()) == {"X": {"scan": OPTIONS}}
    assert settings.launch_table()["X"]["scan"] == OPTIONS
    shipped = Path(fw.__file__).parent / "data" / "launch.json"
    assert "X" not in json.loads(shipped.read_text())


def test_settings_are_of_one_version(monkeypatch, tmp_path):
    monkeypatch.delenv("FASTWEIGHTS_LAUNCH", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = f"launch-{fw.__version__}.json"
    assert settings.tuned_table() == tmp_path / "fastweights" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".cache" / "fastweights" / name
    assert settings.tuned_table() == expected


@pytest.mark.parametrize("text", ["", "{", "[]", '{"X": {"scan": 4}}'])
def test_a_file_that_is_no_table_is_named(tuned, text):
    tuned.parent.mkdir()
    tuned.write_text(text)
    with pytest.raises(ValueError, match=r"somewhere/launch\.json: got"):
        settings.launch_table()
