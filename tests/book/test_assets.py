"""The static files that a site is built with."""

import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book" / "extensions"))

import assets  # noqa: E402  (it lies in book/)


def test_mathjax_is_copied_whole_and_anew_for_another_version(tmp_path):
    source, static = tmp_path / "mathjax" / "es5", tmp_path / "static"
    for name in assets._MATHJAX:
        (source / name).mkdir(parents=True)
        for file in "ab":
            (source / name / file).write_text("1")
    package = source.parent / "package.json"
    config = {"book_mathjax": str(source), "book_static": str(static)}
    app = SimpleNamespace(
        builder=SimpleNamespace(format="html"),
        config=SimpleNamespace(**config),
    )
    copied = static / "mathjax" / assets._MATHJAX[0]
    copied.mkdir(parents=True)
    (copied / "a").write_text("0")  # stopped here, of an older version
    for version in "12":
        package.write_text(version)
        (source / assets._MATHJAX[0] / "b").write_text(version)
        assets.copy_mathjax(app)
        assert [(copied / x).read_text() for x in "ab"] == ["1", version]
    (copied / "b").write_text("untouched")
    assets.copy_mathjax(app)
    assert (copied / "b").read_text() == "untouched"
    assert sorted(tmp_path.iterdir()) == [source.parent, static]
