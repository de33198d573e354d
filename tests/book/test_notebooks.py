"""Notebooks say what the pages say, and fold what the pages fold.

Those of a small book, made here, and the chapters' as `make test` has built
them before: build/notebooks and build/test/html.
"""

import html
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))

import notebooks  # noqa: E402
from equations import typeset  # noqa: E402
from folded import holds  # noqa: E402
from inline_markdown import MarkupError  # noqa: E402
from macros import MACROS, SYMBOLS, expand  # noqa: E402
from notebook_builder import CODE, RESIDUE, commit  # noqa: E402

from fastweights_lab.notebook.plotting import PALETTE  # noqa: E402

SAMPLE = ROOT / "tests" / "book" / "sample_book"
PINS = (ROOT / "constraints.txt").read_text("utf-8")
TRITON = re.search(r"^triton==(.*)", PINS, re.M)[1]
SETTINGS = {"bibtex_bibfiles": [str(SAMPLE / "references.bib")]}
CHAPTERS = ROOT / "chapters"
BUILT, PAGES = ROOT / "build" / "notebooks", ROOT / "build" / "test" / "html"


@pytest.fixture(scope="module", params=["sample", "chapters"])
def book(request, tmp_path_factory):
    """A folder of chapters, its notebooks, and its pages as built."""
    if request.param == "sample":
        made = notebooks.notebooks(SAMPLE, **SETTINGS)
        return SAMPLE, made, site(tmp_path_factory.mktemp("site"))
    changed = max(x.stat().st_mtime for x in CHAPTERS.glob("*.md"))
    for built in (BUILT, PAGES / "index.html"):
        if not built.exists() or built.stat().st_mtime < changed:
            pytest.skip(f"no {built} of these chapters: `make test` has them")
    made = {x.stem: nbformat.read(x, 4) for x in sorted(BUILT.iterdir())}
    return CHAPTERS, made, PAGES


@pytest.fixture(scope="module")
def sample():
    return notebooks.notebooks(SAMPLE, **SETTINGS)["01_first"].cells


def site(out: Path) -> Path:
    """The pages of the small book, their code not run."""
    warnings = io.StringIO()
    with patch_docutils(ROOT / "book"), docutils_namespace():
        app = Sphinx(
            SAMPLE,
            ROOT / "book",
            out,
            out / "doctrees",
            "html",
            confoverrides={"nb_execution_mode": "off", **SETTINGS},
            status=None,
            warning=warnings,
        )
        app.build()
    assert warnings.getvalue() == ""
    return out


def prose(notebook) -> str:
    """Markdown cells without code."""
    cells = [c.source for c in notebook.cells if c.cell_type == "markdown"]
    return CODE.sub("", "\n\n".join(cells))


def article(pages: Path, name: str) -> str:
    """The HTML of a chapter without what surrounds it on its page."""
    page = (pages / f"{name}.html").read_text()
    body = page.partition("<article")[2].partition("</article>")[0]
    # The captions of visible checks stand on pages only.
    return re.sub(r'<p class="checks".*?</p>', "", body, flags=re.S)


def formulas(text: str) -> list[str]:
    """The TeX in a notebook's Markdown."""
    found = re.findall(r"(\$\$?)(.*?)\1", text.replace(r"\$", ""), re.S)
    return [formula for _, formula in found]


def words(text: str) -> str:
    """Text of a page or a notebook without math, markup and spaces."""
    text = text.replace(r"\$", "")
    text = re.sub(r"(\$\$?).*?\1|<math.*?</math>", "", text, flags=re.S)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"[\s*`\\#>]+", "", text)


# Both books


def test_every_code_cell_is_there_and_one_more(book):
    chapters, made, _ = book
    sources = sorted(chapters.glob("*_*.md"))
    assert [path.stem for path in sources] == list(made)
    for path in sources:
        cells = jupytext.read(path, fmt="md:myst").cells
        code = [c.source for c in cells if c.cell_type == "code"]
        written = [
            re.sub(r"\A# @title .*\n", "", cell.source)
            for cell in made[path.stem].cells
            if cell.cell_type == "code"
        ]
        assert len(written) == len(code) + 1
        assert written[1:] == code


def test_no_myst_and_no_macro_survives(book):
    for made in book[1].values():
        assert not RESIDUE.search(prose(made))


def test_equations_carry_the_numbers_of_the_page(book):
    _, made, pages = book
    for name, notebook in made.items():
        page = article(pages, name)
        numbers = re.findall(r'class="eqno">\(([\d.]+)\)', page)
        assert re.findall(r"\\tag\{([\d.]+)\}", prose(notebook)) == numbers


def test_every_formula_can_be_typeset_without_macros(book):
    _, made, pages = book
    for name, notebook in made.items():
        tex = formulas(prose(notebook))
        found = typeset([(x, True) for x in tex], {})
        assert found
        assert [error for _, error in found if error] == []
        assert len(re.findall("<math", article(pages, name))) == len(tex)


def test_titles_are_those_of_the_page(book):
    _, made, pages = book
    title = (
        r'<(?:p|summary) class="admonition-title[^"]*"[^>]*>(.*?)</(?:p|s)'
        r'|<h[1-6]>(.*?)<a class="headerlink'
    )
    for name, notebook in made.items():
        page = article(pages, name)
        text = words(prose(notebook))
        found = [a or b for a, b in re.findall(title, page, re.S)]
        assert found
        for said in found:
            assert words(said) in text, said


def test_references_say_what_the_page_says(book):
    _, made, pages = book
    for name, notebook in made.items():
        page = article(pages, name)
        text = words(prose(notebook))
        links = re.findall(
            r'<a class="reference internal" href="[^"]*#[^"]*">(.*?)</a>',
            page,
            re.S,
        )
        for link in links:
            assert words(link) in text, link


def test_notebooks_are_valid_and_the_same_every_time(book):
    chapters, made, _ = book
    settings = SETTINGS if chapters == SAMPLE else {}
    again = notebooks.notebooks(chapters, **settings)
    for name, notebook in made.items():
        nbformat.validate(notebook)
        assert nbformat.writes(notebook) == nbformat.writes(again[name])
        assert notebook.metadata.kernelspec.name == "python3"
        assert notebook.metadata.language_info.name == "python"
        assert notebook.metadata.accelerator == "GPU"
        assert notebook.metadata.colab.toc_visible
        assert notebook.metadata.colab.name == f"{name}.ipynb"
        head = notebook.cells[1].source
        assert head.startswith("# ")
        assert f"gh-pages/notebooks/{name}.ipynb" in head
        assert f"{name}.html" in head


def test_what_the_page_folds_is_folded(book):
    for notebook in book[1].values():
        first, *rest = notebook.cells
        assert first.metadata.cellView == "form"
        for cell in rest:
            tags = set(cell.metadata.get("tags", []))
            folds = {"hide-cell", "hide-input", "remove-input", "solution"}
            folded = bool(tags & folds)
            assert cell.source.startswith("# @title ") == folded
            assert (cell.metadata.get("cellView") == "form") == folded
            hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
            assert bool(hidden) == folded


# The sample: one of each kind of markup


@pytest.mark.parametrize(
    "text",
    [
        "a reference to (1.1) before it stands",
        r"\begin{aligned}" + "\n",
        "\\end{aligned} \\tag{1.2}\n$$",
        r"2 \* 3 \* 4 stays",
        r"a price of \$5",
        "> **Theorem 1.1 (Weights sum to one)**\n>\n> The weights of (1.1)",
        r"> $$ \sum_s \frac{w_{ts}}{\sum_r w_{tr}} = 1 $$",
        "> **Proof.** Divide both sides of (1.1), as Vaswani",
        "> **Lemma 1.1**",
        "> **Algorithm 1.1 (Online softmax)**\n>\n> 1. Read a score.",
        "> **Note**\n>\n> A note<sup>1</sup>",
        "> **What you will be able to do**\n>\n> - derive (1.2)",
        "<details>\n<summary>Why the maximum</summary>\n\nIt keeps $e^{x}$",
        "> **Aside**\n>\n> A short remark",
        "> A remark without a title.",
        "> **Loop**\n>\n> One step at a time.",
        "![a single dot](data:image/svg+xml;base64,",
        "*Fig. 1.1* The state, from far away.",
        "| form | cost | norm |\n| :-- | --: | --- |\n| loop | $O(T d^2)$ |",
        "> A plain quotation.",
        "<sup>1</sup> The first footnote, see",
        "<sup>2</sup> The second one.",
        "Here: A mean with weights, (1.2), Theorem 1.1,",
        "Lemma 1.1, Exercise 1.1, Exercise 1.1, Fig. 1.1",
        "02_second.html#equation-eq-other)",
        "[(2.1)](https://",
        "[Theorem 2.1](https://",
        "[Exercise 2.1](https://",
        "bibliography.html#",
        "```python\n# a listing, not a cell\nx = 1\n```",
        "> **Exercise 1.1 (Sum)**\n>\n> Write `total(x)`",
        "<details>\n<summary>Solution to Exercise 1.1 (Sum)</summary>",
        "<summary>Solution to Exercise 1.1 (Sum), continued</summary>",
    ],
)
def test_sample_reads(sample, text):
    cells = [c.source for c in sample if c.cell_type == "markdown"]
    assert text in "\n\n".join(cells)


@pytest.mark.parametrize(
    "source, kind",
    [
        ("import math", "imports"),
        ("import math\nimport os\n\nplotting.style()", "imports"),
        ("import math\nimport os\nif x:\n    a = 1", "imports"),
        ("import math\n\nx = 1\ny = 2", "code"),
        ("import math\nimport os\n\ndef f():\n    pass", "code"),
        ("x = 1", "code"),
        ("", "code"),
        ("%pip install x", "code"),
        ("import math\ndraw(fig)", "figure"),
        ("import math\nimport os\nfilm.show(k, v)", "film"),
        ("import math\n@exercise\ndef f():\n    draw(fig)", "exercise"),
    ],
)
def test_what_a_cell_holds(source, kind):
    assert holds(source) == kind


def test_folded_cells_say_what_they_hold(sample):
    titles = re.findall(
        "^# @title (.*)", "\n".join(c.source for c in sample), re.M
    )
    assert titles == [
        "Install the library (in Colab)",
        "Imports",
        "Figure",
        "Check of Exercise 1.1",
        "Solution to Exercise 1.1",
    ]


def test_macros_are_written_out():
    colour = PALETTE["q"]["any"]
    assert expand(r"\q_t") == rf"{{\color{{{colour}}}{{\boldsymbol q}}}}_t"
    assert expand(r"a \\q \qquad \R") == r"a \\q \qquad {\mathbb R}"
    assert set(MACROS) == {rf"\{name}" for name in SYMBOLS}
    assert all("#" not in tex for tex in MACROS.values())
    assert expand(r"A^\tr") == r"A^\top"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("```{note}", "```{seealso}", "'seealso' is no markup"),
        ("```{note}", "```{nothing}", "Unknown directive type"),
        ("```{prf:lemma}", "```{prf:remark}", "remark"),
        ("{eq}`eq-mean` before", "{eq}`eq-gone` before", "eq-gone"),
        ("{doc}`02_second`", "{doc}`03_third`", "03_third"),
        ("{cite:p}`vaswani2017`.\n\n", "{cite:p}`gone`.\n\n", "gone"),
        ("*emphasis*", "{sup}`emphasis`", "'superscript' is no markup"),
        ("tags: [gpu]", "tags: [gpus]", "unknown tag 'gpus'"),
        (":tags: [gpu]", ":tags: [gpu,\n  x]", "could not be read"),
        ("[check:eq-mean]", "[hide-input, check:eq-no]", "eq-no"),
        ("4 + 8 = 12", r"\begin{align} 4 \end{align}", "aligned"),
        ("4 + 8 = 12", "4 + 8 = 12 % sum", "TeX comment"),
        (":alt: a single dot\n", "", "without alt"),
        ("```{tip}\nA tip.", "```{tip}", "Content block expected"),
        (
            "```{tip}\nA tip.\n```",
            "````{tip}\n```{code-cell} python3\n1\n```\n````",
            "a code cell in another block",
        ),
    ],
)
def test_other_markup_is_an_error(tmp_path, old, new, problem):
    chapters = tmp_path / "chapters"
    shutil.copytree(SAMPLE, chapters)
    path = chapters / "01_first.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(MarkupError) as caught:
        notebooks.notebooks(chapters, **SETTINGS)
    assert problem in str(caught.value)
    place = r"01_first\.md:(?:.*at line )?(\d+)"
    places = re.findall(place, str(caught.value))
    line = text[: text.index(old)].count("\n") + 1
    # A reference is placed where its paragraph begins.
    assert any(-6 <= int(place) - line <= 2 for place in places), caught.value


# The first cell


def install(sample, tmp_path, **environment) -> subprocess.CompletedProcess:
    """Run the first cell, with pip replaced by one that says its call."""
    before = environment.pop("before", "")
    script = tmp_path / "first.py"
    script.write_text(before + sample[0].source)
    kept = {k: v for k, v in os.environ.items() if "FASTWEIGHTS" not in k}
    return subprocess.run(
        [sys.executable, str(script)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )


CALLS = """\
import subprocess, sys, types
def run(command, **options):
    if len(sys.argv) > 1:
        return types.SimpleNamespace(returncode=1, stderr=sys.argv[1])
    print(" ".join(command))
    at = command.index("--constraint") + 1
    print(open(command[at]).read())
    return types.SimpleNamespace(returncode=0)
subprocess.run = run
"""
COLAB = "import sys, types\nsys.modules['google.colab'] = sys\n"
SOURCE = re.compile(r"git\+https://[\w./-]+@([0-9a-f]{40}|main)")


@pytest.fixture
def bare(sample, tmp_path):
    """Run the first cell where only what is given is installed."""

    def bare(before: str, *words: str, **versions: str):
        script = tmp_path / "first.py"
        script.write_text(CALLS + before + sample[0].source)
        for name, version in versions.items():
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (info / "METADATA").write_text(text)
        kept = {k: v for k, v in os.environ.items() if "FASTWEIGHTS" not in k}
        return subprocess.run(
            [sys.executable, "-S", script, *words],
            env=kept | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    return bare


@pytest.mark.parametrize("before", ["", COLAB], ids=["here", "colab"])
def test_first_cell_does_nothing_once_installed(sample, tmp_path, before):
    done = install(sample, tmp_path, before=CALLS + before)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_first_cell_says_how_to_install_outside_colab(bare):
    done = bare("", torch="2.11.0")
    assert done.returncode == 1 and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    before, _, source = line.partition(" @ ")
    assert before == '%pip install "fastweights[chapters]'
    assert SOURCE.fullmatch(source.removesuffix('"'))


@pytest.mark.parametrize(
    ("versions", "triton"),
    [
        ({"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.1"}, None),
        ({"torch": "2.15.0"}, f"triton=={TRITON}"),
        ({}, "triton"),
    ],
    ids=["gpu", "cpu", "none"],
)
def test_first_cell_installs_in_colab_beside_what_is_there(
    bare, versions, triton
):
    done = bare(COLAB, **versions)
    assert done.returncode == 0, done.stderr
    command, _, constraints = done.stdout.partition("\n")
    *_, last = command.partition(".txt ")
    source, *others = last.split()
    assert SOURCE.fullmatch(source)
    assert others == ([triton] if triton else [])
    kept = [f"{name}=={version}" for name, version in versions.items()]
    assert sorted(constraints.split()) == sorted(kept)


@pytest.mark.parametrize(
    ("name", "version", "least"),
    [("torch", "2.10.0+cu128", "2.11"), ("triton", "3.5.1", "3.6")],
)
def test_first_cell_names_what_is_too_old(bare, name, version, least):
    done = bare(COLAB, **{"torch": "2.11.0", name: version})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        f"RuntimeError: the library needs {name} {least}, found {version}: "
        f"run %pip install --upgrade {name}, then restart"
    )


def test_first_cell_says_what_pip_says(bare):
    done = bare(COLAB, "No space left", torch="2.11.0")
    assert done.stderr.endswith("RuntimeError: pip says:\nNo space left\n")


def test_first_cell_names_the_commit_of_its_own_clone(tmp_path):
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.check_output(command, text=True).strip()

    inner = tmp_path / "unpacked"
    inner.mkdir()
    assert commit(tmp_path) == "main"
    git("init", "--quiet")
    assert commit(tmp_path) == "main"  # as yet without a commit
    git("commit", "--quiet", "--allow-empty", "-m", "a")
    assert commit(tmp_path) == git("rev-parse", "HEAD")
    assert commit(inner) == "main"


def test_first_cell_installs_from_a_local_source(sample, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            (source / name).write_text((ROOT / name).read_text())
    package = source / "src" / "fastweights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("mark = 1\n")
    target = tmp_path / "target"
    done = install(
        sample,
        tmp_path,
        FASTWEIGHTS_SOURCE=str(source),
        PIP_TARGET=str(target),
        PIP_NO_DEPS="1",
        PIP_NO_INDEX="1",
        PIP_NO_BUILD_ISOLATION="0",  # pip's spelling of: without isolation
    )
    assert done.returncode == 0, done.stderr
    installed = target / "fastweights" / "__init__.py"
    assert installed.read_text() == "mark = 1\n"


# The command


def test_command_writes_notebooks_and_scripts(tmp_path):
    code = notebooks.main(
        [
            *("--chapters", str(SAMPLE), "--confdir", str(SAMPLE)),
            *("--scripts", str(tmp_path / "scripts")),
        ]
    )
    assert code == 0
    scripts = sorted((tmp_path / "scripts").iterdir())
    assert [path.name for path in scripts] == ["01_first.py", "02_second.py"]
    for path in scripts:
        compile(path.read_text(), path, "exec")
