"""Static files made at build time: MathJax and the palette's style sheet."""

import shutil
import tempfile
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

from fastweights_lab.notebook.plotting import PALETTE

# What a page may ask MathJax for; its menu and speech are not shipped.
_MATHJAX = [
    "tex-mml-chtml.js",
    "output/chtml/fonts/woff-v2",
    "input/tex/extensions",
]


def palette_css() -> str:
    """The palette as CSS variables, a block a theme, and a class a symbol."""
    blocks = []
    for theme, selector in [
        ("light", ":root"),
        ("dark", 'html[data-theme="dark"]'),
    ]:
        lines = [
            f"  --fw-{name.lower()}: {colours[theme]};"
            for name, colours in PALETTE.items()
        ]
        blocks.append("\n".join([f"{selector} {{", *lines, "}"]))
    blocks += [
        f".fw-{name.lower()} {{ color: var(--fw-{name.lower()}); }}"
        for name in PALETTE
    ]
    return "\n".join(blocks) + "\n"


def write_palette(app: Sphinx, config: Config) -> None:
    """Begin the generated folder of `html_static_path`."""
    static = Path(config.book_static)
    static.mkdir(parents=True, exist_ok=True)
    (static / "palette.css").write_text(palette_css(), encoding="utf-8")


def copy_mathjax(app: Sphinx) -> None:
    """Copy what pages load of MathJax; other builders need none of it.

    The copy is made elsewhere and put in its place when it is whole, with
    the package.json of its version.
    """
    if app.builder.format != "html":
        return
    source = Path(app.config.book_mathjax)
    target = Path(app.config.book_static, "mathjax")
    if not source.is_dir():
        raise ConfigError(
            f"MathJax is not in {source}: run `make book`, or "
            "`npm ci` in book/"
        )
    version = source.parent / "package.json"
    there = target / version.name
    if there.is_file() and there.read_bytes() == version.read_bytes():
        return
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as beside:
        copy = Path(beside, "mathjax")
        for name in _MATHJAX:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (source / name).is_dir():
                shutil.copytree(source / name, copy / name)
            else:
                shutil.copy(source / name, copy / name)
        shutil.copy(version, copy)
        shutil.rmtree(target, ignore_errors=True)
        copy.rename(target)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("book_static", "", "html", [str])
    app.add_config_value("book_mathjax", "", "html", [str])
    app.connect("config-inited", write_palette)
    app.connect("builder-inited", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
