"""The palette's style sheet, made when the site is built."""

from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config

from fastweights_lab.notebook.plotting import PALETTE


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
    """Make the generated file of `html_static_path`."""
    sheet = Path(config.book_palette)
    sheet.parent.mkdir(parents=True, exist_ok=True)
    sheet.write_text(palette_css(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("book_palette", "", "html", [str])
    app.connect("config-inited", write_palette)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
