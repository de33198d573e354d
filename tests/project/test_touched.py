"""make check runs the tests of what a change touches, and no others."""

import subprocess

import pytest
import touched
from touched import ROOT, chosen, found_for, imported


def names(path):
    return {str(x.relative_to(touched.TESTS)) for x in found_for(path)}


def test_a_module_has_the_tests_that_import_it():
    found = names("src/fastweights/ops/mlstm.py")
    assert "ops/test_mlstm.py" in found and "lab/test_bench.py" not in found
    found = names("src/fastweights/kernels/recurrence/settings.py")
    assert {"compile/test_schedule.py", "compile/test_recurrence.py"} <= found


def test_docstrings_are_the_reference():
    reference = "book/test_api.py"
    assert reference in names("src/fastweights/layers/kda.py")
    assert reference not in names("src/fastweights_lab/records.py")
    assert names("chapters/api/layers.rst") == {reference}


def test_a_helper_has_the_tests_that_use_it():
    assert "kernels/test_decode.py" in names("tests/support/pairwise.py")
    assert names("tests/ops/test_recurrence.py") == {"ops/test_recurrence.py"}
    assert names("README.md") == set()


def test_a_chapter_is_run_and_no_other():
    found = chosen(["chapters/04_decay.md"], interpreted=False)
    assert found[-1] == "tests/book/test_chapters.py"
    assert found[3] == "(book and test_chapters.py and (04_decay))"
    assert "script" not in found[1]  # its answers too
    same = chosen(["tests/book/answers/04_decay.py"], interpreted=False)
    assert same == found


@pytest.mark.parametrize("interpreted", [False, True])
def test_the_interpreter_has_a_process_of_its_own(interpreted):
    found = chosen(["tests/support/inputs.py"], interpreted=interpreted)
    files = [x for x in found if x.endswith(".py")]
    assert files and all((ROOT / x).is_file() for x in files)
    for file in files:
        assert file.startswith("tests/kernels/") == interpreted
    sampled = "kernels and test_recurrence.py and (each_stage" in found[3]
    assert sampled == interpreted


def test_imports_are_found_by_module_and_by_name(tmp_path):
    file = tmp_path / "test_x.py"
    file.write_text("import a.b\nfrom c import d\n")
    assert imported(file) == {"a.b", "c", "c.d"}


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True)


@pytest.mark.parametrize("of", ["a zip", "one commit", "no program"])
def test_without_history_one_line_says_so(of, tmp_path, monkeypatch, capsys):
    if of == "one commit":
        git(tmp_path, "init", "--quiet")
        git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "a")
    if of == "no program":
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert touched.main([]) == 0
    said = capsys.readouterr().out
    assert "no git, or no history" in said and said.count("\n") == 1


def test_a_change_is_found_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "a")
    for name in ("a b.py", "é.py"):
        (tmp_path / name).touch()
    assert sorted(touched.changed("HEAD")) == ["a b.py", "é.py"]
