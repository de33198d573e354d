"""What every chapter must keep to, as functions from a chapter to problems.

A problem is one line of text; a rule that holds returns none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import jupytext

ASSERTING = {"assert_close", "close", "raises"}
_BLOCK = re.compile(
    r"^`{3,}\{(exercise|solution-start|solution-end)\}[ ]*(\S*).*\n"
    r"(?::label:[ ]*(\S+))?",
    re.M,
)


@dataclass
class Cell:
    """A code cell: its source, its tags and where it begins."""

    source: str
    tags: list[str]
    line: int

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", None)
                yield getattr(node.func, "id", name or ""), node

    @property
    def checks(self) -> list[str]:
        return [tag[6:] for tag in self.tags if tag.startswith("check:")]


@dataclass
class Exercise:
    """An exercise and the cells that follow it, up to the next one."""

    label: str
    stubs: list[Cell] = field(default_factory=list)
    checks: dict[str, Cell] = field(default_factory=dict)
    solutions: list[Cell] = field(default_factory=list)
    solved: bool = False


class Chapter:
    """A chapter's source, read into its cells and exercises."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text("utf-8")
        self.cells: list[Cell] = []
        self.exercises: list[Exercise] = []
        self.prose = ""
        self._read()

    def _read(self) -> None:
        end, inside = 0, None
        for cell in jupytext.read(self.path, fmt="md:myst").cells:
            if cell.cell_type == "markdown":
                self.prose += cell.source + "\n"
                for kind, target, label in _BLOCK.findall(cell.source):
                    if kind == "exercise":
                        self.exercises.append(Exercise(label))
                    inside = target if kind == "solution-start" else None
                continue
            start = max(self.text.find(cell.source, end), end)
            end = start + len(cell.source)
            line = self.text.count("\n", 0, start) + 1
            code = Cell(cell.source, cell.metadata.get("tags", []), line)
            self.cells.append(code)
            if self.exercises:
                self._sort(code, self.exercises[-1], inside)

    def _sort(self, cell: Cell, last: Exercise, inside: str | None) -> None:
        if "solution" in cell.tags:
            if inside == last.label:
                last.solutions.append(cell)
        elif "exercise-stub" in cell.tags:
            last.stubs.append(cell)
        for node in cell.tree.body:
            if isinstance(node, ast.FunctionDef) and any(
                getattr(d, "id", getattr(d, "attr", "")) == "exercise"
                for d in node.decorator_list
            ):
                last.checks[node.name] = cell

    @cached_property
    def labels(self) -> list[str]:
        return re.findall(
            r"^`{3,}\{math\}\s*\n:label:[ ]*(\S+)", self.prose, re.M
        )

    def at(self, cell: Cell) -> str:
        return f"{self.path.name}:{cell.line}"


def equations_are_checked(chapter: Chapter) -> Iterator[str]:
    """Each eq- label has a check cell; each check names a label."""
    checked = {label for cell in chapter.cells for label in cell.checks}
    for label in chapter.labels:
        if label.startswith("eq-") and label not in checked:
            yield f"{chapter.path.name}: {label} has no cell check:{label}"
        elif not label.startswith(("eq-", "def-")):
            yield f"{chapter.path.name}: {label} is neither eq- nor def-"
    for cell in chapter.cells:
        for label in set(cell.checks) - set(chapter.labels):
            yield f"{chapter.at(cell)}: check:{label} names no equation"


def checks_assert(chapter: Chapter) -> Iterator[str]:
    """Each check cell contains an assertion."""
    for cell in chapter.cells:
        if cell.checks and not (
            any(isinstance(node, ast.Assert) for node in ast.walk(cell.tree))
            or any(name in ASSERTING for name, _ in cell.calls())
        ):
            yield f"{chapter.at(cell)}: a check that asserts nothing"


def lines_fit(chapter: Chapter) -> Iterator[str]:
    """No line of code, in a cell or a listing, exceeds 79 columns."""
    inside = False
    for number, line in enumerate(chapter.text.splitlines(), 1):
        if re.match(r"\s*`{3,}(\{code-cell\}|\w+$)", line):
            inside = True
        elif re.match(r"\s*`{3,}$", line):
            inside = False
        elif inside and len(line) > 79:
            yield f"{chapter.path.name}:{number}: {len(line)} columns"


def exercises_are_complete(chapter: Chapter) -> Iterator[str]:
    """Each exercise has a stub, a check called on it, and a solution."""
    for exercise in chapter.exercises:
        where = f"{chapter.path.name}: {exercise.label or 'an exercise'}"
        if not exercise.label.startswith("ex-"):
            yield f"{where} has no label ex-..."
        if not exercise.stubs:
            yield f"{where} has no cell tagged exercise-stub"
        if len(exercise.checks) != 1:
            yield f"{where} has {len(exercise.checks)} checks, needs one"
        if not exercise.solutions:
            yield f"{where} has no solution with a cell tagged solution"
        for name, cell in exercise.checks.items():
            if "hide-input" not in cell.tags:
                yield f"{chapter.at(cell)}: {name} is not folded: hide-input"
            if not any(call == name for call, _ in cell.calls()):
                yield f"{chapter.at(cell)}: {name} is not called on the stub"
            if not any(
                call == name
                for s in exercise.solutions
                for call, _ in s.calls()
            ):
                yield f"{where}: the solution does not call {name}"


def exercises_suffice(chapter: Chapter) -> Iterator[str]:
    """A chapter has at least four exercises."""
    if (count := len(chapter.exercises)) < 4:
        yield f"{chapter.path.name}: {count} exercises, needs four"


def figures_have_alt(chapter: Chapter) -> Iterator[str]:
    """Each call of draw() says in words what the figure shows."""
    for cell in chapter.cells:
        for name, call in cell.calls():
            if name != "draw":
                continue
            given = {key.arg: key.value for key in call.keywords}.get("alt")
            empty = isinstance(given, ast.Constant) and not given.value.strip()
            if given is None or empty:
                yield f"{chapter.at(cell)}: draw() without alt"


def imports_are_public(chapter: Chapter) -> Iterator[str]:
    """Nothing private of the library is imported or reached into."""
    for cell in chapter.cells:
        for node in ast.walk(cell.tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            names = [n for n in names if n.startswith("fastweights")]
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            for name in names:
                if re.search(r"(^|\.)_(?!_)", name):
                    yield f"{chapter.at(cell)}: {name} is private"


class _Normal(ast.NodeTransformer):
    """Renames what a function names itself by order of appearance."""

    def __init__(self, function: ast.FunctionDef) -> None:
        own = {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)} | {
            n.id
            for n in ast.walk(function)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        self.own, self.names = own, {}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id in self.own:
            node.id = self.names.setdefault(node.id, f"x{len(self.names)}")
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        if node.value is None:
            return None
        self.generic_visit(node)
        return ast.Assign([node.target], node.value)


def bodies(tree: ast.AST) -> dict[str, str]:
    """Function name -> its body of three statements or more, normalised.

    Docstrings, annotations and the names of arguments and variables do not
    count; statements in loops and branches do.
    """
    found = {}
    for function in list(ast.walk(tree)):
        if not isinstance(function, ast.FunctionDef):
            continue
        body = function.body
        if ast.get_docstring(function) is not None:
            body = body[1:]
        module = ast.Module(body, [])
        size = sum(isinstance(n, ast.stmt) for n in ast.walk(module))
        if size >= 3:
            copy = ast.parse(ast.unparse(module))
            found[function.name] = ast.dump(_Normal(function).visit(copy))
    return found


@cache
def functions_of(src: Path) -> dict[str, str]:
    """Of each body in the folder's files where it stands: file and name."""
    return {
        body: f"{path.relative_to(src).as_posix()}, {name}"
        for path in sorted(src.rglob("*.py"))
        for name, body in bodies(ast.parse(path.read_text("utf-8"))).items()
    }


def nothing_is_retyped(chapter: Chapter, src: Path) -> Iterator[str]:
    """No function of a chapter has the body of one in ``src``."""
    library = functions_of(src)
    for cell in chapter.cells:
        for name, body in bodies(cell.tree).items():
            if body in library:
                yield f"{chapter.at(cell)}: {name} repeats {library[body]}"


RULES = [
    equations_are_checked,
    checks_assert,
    lines_fit,
    exercises_are_complete,
    figures_have_alt,
    imports_are_public,
]
