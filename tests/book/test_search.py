"""The search of the built site: which place a query finds first."""

import base64
import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(os.environ.get("FASTWEIGHTS_SITE", ROOT / "build/test/html"))
STATIC = SITE / "_static"

pytestmark = [
    pytest.mark.skipif(
        not SITE.is_dir(), reason=f"no site in {SITE}: `make test` builds it"
    ),
    pytest.mark.skipif(not shutil.which("node"), reason="no node"),
]

FIRST = {
    "UT transform": "08_wy#one-triangular-system-gives-all-new-values",
    "WY representation": "08_wy#a-chain-of-reflections-becomes-one-product",
    "cu_seqlens": "api/operators#fastweights.linear_recurrence",
    "patch_transformers": "api/operators#fastweights.patch_transformers",
    "install": "index#how-to-read-it",
    "NaN": "appendix_a_floats"
    "#a-row-with-nothing-to-read-poisons-every-gradient",
    "Kimi": "09_gated_delta#in-kimi-delta-attention-only-one-order-survives",
    "state size": "11_memory#the-size-of-the-state-beats-the-rule",
    "needle": "11_memory#a-needle-lasts-while-its-key-is-left-alone",
    "log-sum-exp": "01_softmax#one-pass-is-enough-in-any-order",
    # a step's words, with a plural and a letter wrong
    "secondary chunk": "05_gates#a-border-keeps-every-factor-below-one",
    "half precision": "appendix_a_floats#half-precision-stops-counting",
    "rooflnie": "01_softmax#the-roofline-the-slower-of-two-rates-decides",
    # names of the API, as a program has them
    "fw.kda": "api/operators#fastweights.kda",
    "GatedDeltaNet": "api/layers#fastweights.layers.GatedDeltaNet",
    "generate": "api/models#fastweights.models.LanguageModel.generate",
    # what goes wrong, what it costs, what came after
    "padding must not write": "03_chunkwise#two-lines-compute-a-chunk",
    "key-value cache": "01_softmax#the-key-value-cache-outgrows-the-model",
    "hybrid": "14_serving#users-by-the-thousand",
    "habits": "12_deep_memory#who-finds-the-habits",
}


def test_a_query_finds_its_section_first() -> None:
    said = subprocess.run(
        ["node", str(Path(__file__).with_name("search.js")), str(SITE)],
        input=json.dumps([*FIRST]),
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(zip(FIRST, json.loads(said.stdout), strict=True))
    wrong = {q: found[q] for q in FIRST if found[q][:1] != [FIRST[q]]}
    assert not wrong


def test_the_search_is_small_and_the_only_one() -> None:
    """And loaded when somebody searches: no page names it."""
    files = [STATIC / f"{name}.js" for name in ("minisearch", "places")]
    assert sum(file.stat().st_size for file in files) < 500_000
    gone = ["searchindex.js", "search.html", "_static/searchtools.js"]
    assert not [name for name in gone if (SITE / name).exists()]
    named = (SITE / "index.html").read_text("utf-8")
    assert 'src="_static/search.js' in named
    for word in (*gone, "places.js", "minisearch.js"):
        assert f'src="{word}' not in named


def places() -> list[dict[str, str]]:
    packed = (STATIC / "places.js").read_text("utf-8").split('"')[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_what_is_found_is_there_and_is_text() -> None:
    """Each place is an address; none has TeX, buttons or output."""
    texts: dict[str, str] = {}
    for place in places():
        page = place["page"]
        if page not in texts:
            texts[page] = (SITE / f"{page}.html").read_text("utf-8")
        assert f'id="{place["id"]}"' in texts[page], place
        furniture = r"\\[a-z]{2}|the stub still|Show the |\bchecks \("
        assert not re.search(furniture, place["text"]), place
