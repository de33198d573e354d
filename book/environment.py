"""The environment of the Makefile; imports nothing that is not in Python.

With no argument it prints what this Python lacks, with `versions` what runs
the book's cells; with `make .venv` it makes a virtual environment in that
folder. `beside build/other .venv/bin/python` makes one that has no packages
of its own but those of another Python's, which has to be of the same minor
version.
"""

import platform
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # a Python that is too old
    tomllib = None

ROOT = Path(__file__).resolve().parent.parent
# The packages whose version a cell's output may show.
COMPUTING = ("torch", "triton", "numpy", "sympy", "matplotlib")


def requirements() -> list[str]:
    """What pyproject.toml asks for, every extra included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = project["project"]
    extras = project["optional-dependencies"].values()
    return project["dependencies"] + [name for e in extras for name in e]


def lacking() -> list[str]:
    """The requirements that this Python's packages do not meet."""
    if tomllib is None:
        return ["Python 3.11 or newer"]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement
    missing = []
    for requirement in map(Requirement, requirements()):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            missing.append(str(requirement).split(";")[0].strip())
    return missing


def versions() -> str:
    """This Python's version, and those of the packages that compute."""
    found = [f"Python {platform.python_version()}"]
    for name in COMPUTING:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def make(folder: str) -> None:
    """A virtual environment with pip, also where ensurepip is left out."""
    try:
        venv.create(folder, clear=True, with_pip=True)
    except (subprocess.CalledProcessError, ImportError):
        venv.create(folder, clear=True, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", folder]
        if subprocess.run([*pip, "install", "-q", "pip"]).returncode:
            sys.exit("no pip for .venv: install python3-venv (Debian)")


def beside(folder: str, python: str) -> None:
    """A virtual environment of this Python with another's packages."""
    code = (
        "import sys, sysconfig; print('%d.%d' % sys.version_info[:2]); "
        "print(sysconfig.get_path('purelib'))"
    )
    said = subprocess.check_output([python, "-c", code], text=True)
    minor, packages = said.splitlines()
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if minor != own:
        sys.exit(f"{python} is Python {minor}, not {own}")
    venv.create(folder, clear=True)
    there = sysconfig.get_path("purelib", "venv", {"base": folder})
    line = f"import site; site.addsitedir({packages!r})\n"
    Path(there, "others.pth").write_text(line)


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make(sys.argv[2])
    elif sys.argv[1:2] == ["beside"]:
        beside(*sys.argv[2:])
    elif sys.argv[1:] == ["versions"]:
        print(versions())
    else:
        print(*lacking(), sep=", ")
