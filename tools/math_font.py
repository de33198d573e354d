"""Cut the font of the book's equations to the characters that they need.

    pip install brotli
    python tools/math_font.py STIXTwoMath-Regular.ttf

The whole font (github.com/stipub/stixfonts, and in the package ziamath) has
1.5 MB. Run this when tests/book/test_equations.py misses a character.
"""

import re
import sys
from pathlib import Path

from fontTools.subset import Options, Subsetter, load_font, save_font
from fontTools.ttLib import TTFont

ROOT = Path(__file__).resolve().parents[1]
FONT = ROOT / "book" / "_static" / "STIXTwoMath.woff2"
# Roots, and letters: Greek, italic (which browsers draw for <mi>x</mi>), bold.
ALWAYS = {
    *"\u221a\u210e",
    *map(chr, range(0x20, 0x7F)),
    *map(chr, range(0x391, 0x3CA)),
    *map(chr, range(0x1D434, 0x1D49C)),
    *map(chr, range(0x1D6E2, 0x1D71C)),
} - {"\u03a2", "\U0001d455"}  # no characters


def characters(site: Path) -> set[str]:
    """The characters in the equations of a built site."""
    found = set()
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        text = re.sub(r"<annotation.*?</annotation>", "", text, flags=re.S)
        for math in re.findall(r"<math.*?</math>", text, re.S):
            found |= set(re.sub("<.*?>", "", math))
    return found - {"\n", "\ufe0e"}  # U+FE0E: no emoji


def narrow_roots(font: TTFont) -> None:
    """Give tall roots the width of the lowest.

    Chromium leaves room for the widest one after each root.
    """
    root = font.getBestCmap()[0x221A]
    variants = font["MATH"].table.MathVariants
    place = variants.VertGlyphCoverage.glyphs.index(root)
    sizes = variants.VertGlyphConstruction[place]
    width, _ = font["hmtx"][root]
    for name in {
        *(x.VariantGlyph for x in sizes.MathGlyphVariantRecord),
        *(x.glyph for x in sizes.GlyphAssembly.PartRecords),
    }:
        glyph = font["glyf"][name]
        glyph.coordinates.scale((width / font["hmtx"][name][0], 1))
        glyph.recalcBounds(font["glyf"])
        font["hmtx"][name] = (width, glyph.xMin)


if __name__ == "__main__":
    options = Options(flavor="woff2", hinting=False)
    options.layout_features = ["dtls", "flac", "ss01", "ss04", "ssty"]
    font = load_font(sys.argv[1], options)
    subset = Subsetter(options)
    needed = ALWAYS | characters(ROOT / "build" / "html")
    subset.populate(text="".join(needed))
    subset.subset(font)
    # As in TeX: the descender of a beta moves its index by little.
    constants = font["MATH"].table.MathConstants
    constants.SubscriptBaselineDropMin.Value = 50
    narrow_roots(font)
    save_font(font, str(FONT), options)
    print(f"{FONT}: {FONT.stat().st_size} bytes")
