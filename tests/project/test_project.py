"""The project's own files agree with one another and keep their policies."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from pathlib import Path

import mutants
import pairs
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fastweights as fw
from fastweights import torch_internals
from fastweights.models import LanguageModel, ModelConfig

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
REQUIREMENTS = [
    Requirement(text)
    for group in [PROJECT["project"]["dependencies"], *EXTRAS.values()]
    for text in group
]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$",
        (ROOT / "constraints.txt").read_text("utf-8"),
        re.M,
    )
}
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = " ".join(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)).split()
NEWER = "3.15"  # than the pins have wheels for
CODE = {".css", ".js", ".py", ".toml", ".yaml", ".yml"}
TEXT = {*CODE, "", ".bib", ".json", ".md", ".svg", ".txt"}


def tracked() -> list[Path]:
    """The files of the checkout, or none where this is not one."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    names = listing.stdout.split("\0") if not listing.returncode else []
    return [ROOT / n for n in names if n and (ROOT / n).is_file()]


def test_what_is_cited_is_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == PROJECT["project"]["version"]
    assert cited["repository-code"] == PROJECT["project"]["urls"]["Repository"]
    for file in ("README.md", "chapters/index.md"):
        (entry,) = re.findall(
            r"```bibtex\n(.*?)```", (ROOT / file).read_text("utf-8"), re.S
        )
        for said in (cited["title"], cited["repository-code"]):
            assert f"{{{said}}}" in entry
        assert f"{{{cited['date-released'].year}}}" in entry
    assert cited["version"] in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_page_of_the_kernels_names_what_is_there():
    """Capital words and what is in backticks: names, launches and files.

    And of indices, i_*, all that the kernels have and no others.
    """
    folder = ROOT / "src/fastweights/kernels"
    names = {"CUDA", "KDA", "TUNING", "G_C", "S_N"} | {*dir(fw), "fw"}
    for file in folder.parent.rglob("*.*"):
        names.add(file.name)
        if file.suffix == ".py" and folder in file.parents:
            tokens = tokenize.generate_tokens(file.open().readline)
            names |= {token.string.strip('"') for token in tokens}
    page = (folder / "README.md").read_text("utf-8")
    said = set(re.findall(r"\b[A-Z][A-Z_]+\b", page))
    for code in re.findall(r"`(?:[\w/]+/)?([^`\n]+)`", page):
        said |= {code} & names or {*re.findall(r"\w+", code)}
    assert len(said) > 100 and not said - names, said - names
    code = "".join(file.read_text("utf-8") for file in folder.rglob("*.py"))
    said, found = (set(re.findall(r"\bi_\w+", x)) for x in (page, code))
    assert said == found, said ^ found


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_tested_versions_are_those_that_are_installed(name):
    """The oldest is what pyproject.toml asks for, the pin lies between."""
    oldest, newest = torch_internals.TESTED[name]
    pinned = tuple(int(x) for x in PINS[name].split(".")[:2])
    assert oldest <= pinned <= newest
    least = next(x for x in REQUIREMENTS if x.name == name).specifier
    assert str(least) == f">={oldest[0]}.{oldest[1]}"
    for end, version in zip(pairs.ENDS, (oldest, newest), strict=True):
        dotted = ".".join(map(str, version))
        assert f"{name}=={dotted}.*" in pairs.requirements(end)
    for name in (*pairs.COMPILED, *pairs.INTERPRETED):
        assert (ROOT / "tests" / name).exists()


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_the_pin_satisfies_the_bound(requirement: Requirement) -> None:
    pin = PINS.get(canonicalize_name(requirement.name))
    assert pin, f"constraints.txt does not pin {requirement.name}"
    assert requirement.specifier.contains(pin)


def test_environment_yml_agrees_with_pyproject() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    *packages, pip = conda["dependencies"]
    python = PROJECT["project"]["requires-python"]
    assert f"python {python},<{NEWER}" in packages
    assert "pip" in packages
    assert any(name.startswith("nodejs") for name in packages)
    extras = ",".join(
        sorted(EXTRAS, key=["chapters", "book", "models", "test"].index)
    )
    assert pip["pip"] == ["-c constraints.txt", f"-e .[{extras}]"]


def test_the_makefile_asks_for_the_same_python_and_extras() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    least, beyond = (x.replace(".", ", ") for x in (oldest, NEWER))
    newest = f"3.{int(NEWER.split('.')[1]) - 1}"
    assert f"PYTHONS := {oldest} to {newest}" in MAKEFILE
    assert f"({least}) <= sys.version_info < ({beyond})" in MAKEFILE
    assert "-c constraints.txt" in MAKEFILE
    assert "-e '.[chapters,book,models,test]'" in MAKEFILE


@pytest.mark.parametrize(
    "file", [".github/workflows", "README.md", ".ci/run"], ids=str
)
def test_every_make_target_named_elsewhere_exists(file: str) -> None:
    path = ROOT / file
    files = path.glob("*.yml") if path.is_dir() else [path]
    text = "\n".join(f.read_text("utf-8") for f in files)
    before = r"(?:`|run: |exec |^\s*)"
    named = set(re.findall(rf"{before}make ([a-z-]+)", text, re.M))
    assert named
    assert named <= set(TARGETS)


def test_the_notebooks_run_each_week_wherever_a_reader_may() -> None:
    """On every Python, with one thread and two, and an older processor."""
    text = (ROOT / ".github/workflows/publish.yml").read_text("utf-8")
    weekly = yaml.safe_load(text)["jobs"]["weekly"]
    runs = weekly["strategy"]["matrix"]["include"]
    pythons = [f"3.{minor}" for minor in range(11, int(NEWER[2:]))]
    assert [run["python"] for run in runs] == pythons
    for name, values in {
        "threads": {1, 2},
        "processor": {"default", "avx2"},
    }.items():
        assert {run[name] for run in runs} == values
    *_, notebooks = weekly["steps"]
    assert "--nbval-lax" in notebooks["run"]
    assert notebooks["env"] == {
        "OMP_NUM_THREADS": "${{ matrix.threads }}",
        "ATEN_CPU_CAPABILITY": "${{ matrix.processor }}",
    }


def test_the_lock_file_names_no_registry() -> None:
    lock = (ROOT / "book" / "package-lock.json").read_text("utf-8")
    wanted = json.loads((ROOT / "book" / "package.json").read_text("utf-8"))
    assert '"resolved"' not in lock
    for name, version in wanted["dependencies"].items():
        locked = json.loads(lock)["packages"][f"node_modules/{name}"]
        assert locked["version"] == version


def test_the_sdist_has_no_test_without_what_it_imports(tmp_path):
    source = tmp_path / "source"
    for name in ["pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"]:
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    for name in ["src/fastweights/__init__.py", "tests/test_x.py"]:
        (source / name).parent.mkdir(parents=True)
        (source / name).touch()
    build = "import setuptools.build_meta as b; b.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True)
    [sdist] = (source / "dist").iterdir()
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(x.endswith("fastweights/__init__.py") for x in names)
    assert not [x for x in names if "/tests" in x]


def test_hooks_need_no_network() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    for repository in yaml.safe_load(hooks)["repos"]:
        assert repository["repo"] == "local"
        assert all(h["language"] == "system" for h in repository["hooks"])


def test_lines_are_clean_and_code_fits_its_page() -> None:
    faults = []
    for path in tracked():
        if path.suffix not in TEXT:
            continue
        text = path.read_text("utf-8")
        name = path.relative_to(ROOT)
        if text and not text.endswith("\n"):
            faults.append(f"{name}: no newline at its end")
        if re.search(r"^(<{7}|>{7}) ", text, re.M):
            faults.append(f"{name}: a merge conflict")
        for number, line in enumerate(text.splitlines(), 1):
            if line != line.rstrip():
                faults.append(f"{name}:{number}: trailing space")
            if path.suffix in CODE and len(line) > 79:
                faults.append(f"{name}:{number}: {len(line)} columns")
    assert not faults, "\n".join(faults)


def test_each_mutant_has_something_to_replace() -> None:
    """Where the code has moved on, mutants.py would break nothing."""
    stale = []
    for name, (file, old, new, tests) in mutants.MUTANTS.items():
        test, text = ROOT / "tests" / tests.partition("::")[0], ""
        if (ROOT / "src" / file).is_file():
            text = (ROOT / "src" / file).read_text("utf-8")
        if old not in text or old == new or not test.is_file():
            stale.append(name)
    assert not stale


def test_the_readmes_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself, but those without an import, which go on.

    The one that needs transformers runs in test_compat; the model that
    another loads is smaller than the program's own.
    """
    monkeypatch.chdir(tmp_path)
    LanguageModel(ModelConfig(257, 32, 1)).save("run")
    readme = (ROOT / "README.md").read_text("utf-8")
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", readme, re.S)
    blocks = [block for block in blocks if "transformers" not in block]
    assert len(blocks) == 6
    for block in blocks:
        names = {} if "import " in block else names
        exec(block, names)
        if "decode_step" in block:
            q, o = names["q"], names["o"]
            assert o.shape == (1, 1, *q.shape[2:])
