"""A function's source without the branches that known arguments decide.

The library writes each stage once for the whole family; a chapter shows a
part. :func:`specialise` puts known arguments in the place of their names,
then drops or dedents branches and removes what nothing reads any more. Each
rule finds a place in the tree and edits the text there: other lines stay.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

Given = Mapping[str, Any]
Edits = list[tuple[int, int, str | None]]  # None: an item and its comma go

WIDTH = 79
CONSTANTS = (bool, int, float, str, type(None))
ATOMS = (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Call)
HOLDERS = (ast.Assign, ast.Return, ast.Call, ast.keyword, ast.Tuple, ast.If)
CHECKS = r"raise\b|assert |([\w.]+\.)?_?(check|need|refuse|wrong)(_\w+)?\("
UNKNOWN = object()


def source(obj: Any) -> str:
    """The source text of a function, class or Triton kernel, dedented."""
    raw = getattr(obj, "fn", obj)  # a triton.jit function wraps its own
    return textwrap.dedent(inspect.getsource(raw)).rstrip()


def specialise(
    *objects: Any,
    given: Given | None = None,
    docstring: bool | str = True,
    checks: bool = True,
) -> list[str]:
    """The source of each object, without what is not asked for.

    ``given`` has known parameters as constants, ``{"beta": None}``; calls
    between the objects lose the arguments that go with them. ``docstring`` is
    True, False or "summary", the first paragraph. ``checks=False`` leaves out
    the lines that check arguments. TypeError for a value that is no constant,
    ValueError for no parameter's name or a call with another value for one.
    """
    if docstring not in (True, False, "summary"):
        raise ValueError(f"docstring: got {docstring!r}")
    given, raws = given or {}, [getattr(obj, "fn", obj) for obj in objects]
    names = [getattr(raw, "__globals__", {}) for raw in raws]
    cuts = [*map(Cut, map(source, raws), itertools.repeat(given), names)]
    for name, value in given.items():
        if not isinstance(value, CONSTANTS):
            raise TypeError(f"given[{name!r}]: {type(value)} is no constant")
        if not any(name in cut.given for cut in cuts):
            raise ValueError(f"given: got {name!r}, need a parameter's name")
    lost: dict[Any, dict[str, Edits]] = {}
    for i, raw in enumerate(raws):
        cut = cuts[i].reduced(checks)
        gone = lost[raw] = cut.unread_parameters()
        cuts[i] = cut.edited(list(itertools.chain(*gone.values())))
    for i, raw in enumerate(raws):
        cut = cuts[i].edited(cuts[i].lost_arguments(lost, given))
        if docstring is not True:
            cut = cut.edited(cut.docstrings(docstring == "summary"))
        if cut.text != source(raw):
            cut = cut.edited(cut.joined(source(raw)))
            cut.text = re.sub(r"\n{3,}", "\n\n", cut.text.rstrip())
        compile(cut.text, raw.__qualname__, "exec")
        cuts[i] = cut
    return [cut.text for cut in cuts]


class Cut:
    """A text, and the rules: each asks for its edits at a node, if any."""

    def __init__(self, text: str, given: Given, namespace: Given) -> None:
        self.text, self.namespace, self.original = text, namespace, self
        self.lines = text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]
        self.top: Any = ast.parse(text).body[0]
        self.nodes: list[Any] = list(ast.walk(self.top))
        self.parents: dict[Any, Any] = {
            child: n for n in self.nodes for child in ast.iter_child_nodes(n)
        }
        quotes = [n for n in self.nodes if isinstance(n, ast.JoinedStr)]
        self.quoted = {n for quote in quotes for n in ast.walk(quote)}
        self.loads = Counter(n.id for n in _reads([self.top]))
        self.bound = Counter(map(_binding, self.nodes))
        self.parameters: dict[str, tuple[Any, Any]] = {}  # and their defaults
        if a := getattr(self.top, "args", None):
            pairs = [*itertools.zip_longest(a.args[::-1], a.defaults[::-1])]
            pairs += zip(a.kwonlyargs, a.kw_defaults, strict=True)
            self.parameters = {pair[0].arg: pair for pair in pairs}
        self.given = {n: given[n] for n in self.parameters if n in given}

    def reduced(self, checks: bool = True) -> Cut:
        rules = [self.unread] if checks else [self.check, self.unread]
        if self.given:
            rules += [self.decided, self.folded, self.known]
            rules += [self.chunks, self.called]
        for rule, node in itertools.product(rules, self.nodes):
            if edits := rule(node):
                return self.edited(edits).reduced(checks)
        return self

    def edited(self, edits: Edits) -> Cut:
        text = self.text
        last_first = sorted(edits, key=lambda e: e[:2], reverse=True)
        for start, end, new in last_first:
            if new is None:
                comma = r"[ \t]*,[ \t]*(#.*)?\s*(?![\s)\]])"
                before = text[:start].rstrip()
                if behind := re.match(comma, text[end:]):
                    end += behind.end()
                elif before.endswith(","):
                    start = len(before) - 1
            text = text[:start] + (new or "") + text[end:]
        cut = Cut(text, self.given, self.namespace)
        cut.original = self.original
        return cut

    def span(self, node: Any) -> tuple[int, int]:
        def at(row: int, column: int) -> int:  # a column counts bytes
            before = self.lines[row - 1].encode()[:column]
            return self.starts[row - 1] + len(before.decode())

        start = at(node.lineno, node.col_offset)
        return start, at(node.end_lineno, node.end_col_offset)

    def grouped(self, node: Any) -> tuple[int, int]:
        """The span with parentheses that do nothing but group it."""
        start, end = self.span(node)
        opens = re.search(r"(?<![\w\])])\(\s*$", self.text[:start])
        closes = re.match(r"\s*\)", self.text[end:])
        if opens and closes:
            return opens.start(), end + closes.end()
        return start, end

    def replaced(self, node: Any, part: Any) -> Edits:
        new = self.text[slice(*self.span(part))]
        plain = isinstance(self.parents[node], HOLDERS) and "\n" not in new
        bare = plain or isinstance(part, ATOMS)
        return [(*self.grouped(node), new if bare else f"({new})")]

    def filled(self, name: str, new: str, parts: list[Any]) -> Edits:
        nodes = [n for n in _reads(parts, name) if n not in self.quoted]
        return [(*self.span(n), new) for n in nodes]

    def first_row(self, node: Any) -> int:
        row, comment = node.lineno, " " * node.col_offset + "#"
        while self.lines[row - 2].startswith(comment):
            row -= 1
        return row

    def removed(self, node: Any) -> Edits:
        parent = self.parents[node]
        rest = getattr(parent, "orelse", None)
        if [node] in (getattr(parent, "body", None), rest):
            if parent is self.top or rest:
                return [(*self.span(node), "pass")]
            return self.removed(parent)
        start = self.starts[self.first_row(node) - 1]
        return [(start, self.starts[node.end_lineno], "")]

    def check(self, node: Any) -> Edits:
        """A statement that does nothing but check arguments goes."""
        block, chained = [node], getattr(node, "orelse", [])
        if isinstance(node, ast.If) and not chained and not self.is_elif(node):
            block = node.body
        elif not isinstance(node, (ast.Expr, ast.Assert)):
            return []
        plain = all(isinstance(s, ast.Assign) for s in block[:-1])
        checks = re.match(CHECKS, ast.unparse(block[-1]))
        return self.removed(node) if plain and checks else []

    def is_elif(self, node: Any) -> bool:
        return self.lines[node.lineno - 1].lstrip().startswith("elif")

    def decided(self, node: Any) -> Edits:
        """One branch stays of an if statement whose test is known."""
        test = _constant(getattr(node, "test", None))
        if not isinstance(node, ast.If) or test is UNKNOWN:
            return []
        stays = node.body if test else node.orelse
        nested, last = self.is_elif(node), node.end_lineno or 0
        if not stays and not nested:
            return self.removed(node)
        if test or (stays and not nested | self.is_elif(stays[0])):
            first, end = self.first_row(stays[0]), stays[-1].end_lineno or 0
            rows = self.lines[first - 1 : end]
            cut = 0 if nested else stays[0].col_offset - node.col_offset
            new = " " * node.col_offset + "else:\n" if nested else ""
            new += "".join(r[cut:] if r[:cut].isspace() else r for r in rows)
            assert not cut or '"""' not in new, "strings are not dedented"
            block = getattr(self.parents.get(node), "body", [])
            if node in block and isinstance(
                stays[-1], (ast.Return, ast.Raise)
            ):
                last = block[-1].end_lineno  # nothing behind it is reached
        else:
            new = "".join(self.lines[node.body[-1].end_lineno or 0 : last])
            if not nested:
                new = re.sub(r"(?m)^( *)elif", r"\1if", new, count=1)
        return [(self.starts[node.lineno - 1], self.starts[last], new)]

    def unread(self, node: Any) -> Edits:
        """An assignment goes if it is read no more, or says what is given."""
        if not isinstance(node, ast.Assign):
            return []
        names, old = list(map(ast.unparse, node.targets)), self.original.loads
        unread = all(old[n] > self.loads[n] == 0 for n in names)
        unread &= "(" not in ast.unparse(node.value)
        new = {n: _constant(node.value) for n in names if self.bound[n] == 2}
        says = list(new) == names and new.items() <= self.given.items()
        return self.removed(node) if unread or says else []

    def chunks(self, node: Any) -> Edits:
        """``for a_n, b_n in each_chunk(a, None)``: b_n is None, so it goes."""
        names = getattr(getattr(node, "target", None), "elts", [])
        heads = [n for n in self.nodes if getattr(n, "id", "") == "each_chunk"]
        calls = [self.parents[head] for head in heads]
        edits: Edits = []
        if len(calls) == 1 and len(calls[0].args) == len(names):
            for name, arg in zip(names, calls[0].args, strict=True):
                if _constant(arg) is None and self.bound[name.id] == 1:
                    edits += self.filled(name.id, "None", [self.top])
                    edits += [(*self.span(n), None) for n in (name, arg)]
        return edits

    def known(self, node: Any) -> Edits:
        """A known name is replaced by its value."""
        edits: Edits = []
        if node is self.top:
            for name, value in self.given.items():
                new = f"({value})" if repr(value)[0] == "-" else repr(value)
                edits += self.filled(name, new, _reach(node.body, name)[0])
        elif isinstance(node, ast.Assign):
            new = ast.unparse(node.value)  # None, or in a = b, b
            left = ast.unparse(node) not in self.original.text
            if new in {"None", "True", "False"} or (
                left and self.bound[new] == 1
            ):
                for name in map(ast.unparse, node.targets):
                    if self.bound[name] == 1:
                        edits += self.filled(name, new, [self.top])
        return edits

    def folded(self, node: Any) -> Edits:
        """The known part of an expression goes."""
        match node:
            case ast.IfExp(test, body, orelse):
                if (known := _constant(test)) is not UNKNOWN:
                    return self.replaced(node, body if known else orelse)
            case ast.UnaryOp(ast.Not(), operand):
                if (known := _constant(operand)) is not UNKNOWN:
                    return [(*self.grouped(node), repr(not known))]
            case ast.Compare(left, [op], [right]):
                a, b = _constant(left), _constant(right)
                same = isinstance(op, (ast.Is, ast.Eq))
                other = isinstance(op, (ast.IsNot, ast.NotEq))
                if UNKNOWN not in (a, b) and (same or other):
                    return [(*self.grouped(node), repr((a == b) is same))]
            case ast.BoolOp(op, values):
                spans = [self.grouped(v) for v in values]
                for i, known in enumerate(map(_constant, values)):
                    if known is UNKNOWN:
                        continue
                    if bool(known) is isinstance(op, ast.Or):
                        return self.replaced(node, values[i])
                    if i + 1 < len(values):
                        return [(spans[i][0], spans[i + 1][0], "")]
                    if isinstance(known, bool):  # x or None is not x
                        return [(spans[i - 1][1], spans[i][1], "")]
        return []

    def called(self, node: Any) -> Edits:
        """A call such as decayed(x, None) is the argument it returns."""
        function, args = _arguments(node, self.namespace)
        given = {name: _constant(arg) for name, arg in args.items()}
        given = {n: v for n, v in given.items() if v is not UNKNOWN}
        if given:
            body = Cut(source(function), given, {}).reduced().top.body
            match [s for s in body if not isinstance(s, ast.Expr)]:
                case [ast.Return(ast.Constant(value))]:
                    return [(*self.span(node), repr(value))]
                case [ast.Return(ast.Name(name))] if name in args:
                    return self.replaced(node, args[name])
        return []

    def unread_parameters(self) -> dict[str, Edits]:
        gone: dict[str, Edits] = {}
        for name in self.given:
            parts, ended = _reach(self.top.body, name)
            if ended and not _reads(parts, name):
                arg, default = self.parameters[name]
                end = self.span(default or arg)[1]
                gone[name] = [(self.span(arg)[0], end, None)]
        named = [arg.arg for arg in self.top.args.kwonlyargs] if gone else []
        if named and gone.keys() >= set(named) and not self.top.args.vararg:
            star = self.text.rindex("*", 0, gone[named[0]][0][0])
            gone[named[0]].append((star, star + 1, None))
        return gone

    def lost_arguments(self, lost: Mapping[Any, Any], given: Given) -> Edits:
        edits: Edits = []
        for call in self.nodes:
            function, args = _arguments(call, self.namespace)
            for name in args.keys() & lost.get(function, {}).keys():
                arg, parent = args[name], self.parents[args[name]]
                if given[name] != _constant(arg) and ast.unparse(arg) != name:
                    gives = f"{self.top.name} gives {function.__name__} it"
                    raise ValueError(f"given: {name} is lost, but {gives}")
                item = parent if isinstance(parent, ast.keyword) else arg
                edits.append((*self.span(item), None))
        return edits

    def docstrings(self, summary: bool) -> Edits:
        edits: Edits = []
        for node in self.nodes:
            kind = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            if not kind or ast.get_docstring(node) is None:
                continue
            start, end = self.span(node.body[0])
            first, *more = self.text[start:end].split("\n\n")
            if summary and more:
                edits.append((start, end, first + '"""'))
            elif not summary and len(node.body) > 1:
                after = self.starts[self.first_row(node.body[1]) - 1]
                edits.append((self.starts[node.body[0].lineno - 1], after, ""))
        return edits

    def joined(self, original: str) -> Edits:
        edits: Edits = []
        old = {line.strip() for line in original.splitlines()}
        for node in (n for n in self.nodes if isinstance(n, ast.stmt)):
            body, first = getattr(node, "body", None), node.lineno
            last = node.end_lineno or 0
            last = self.first_row(body[0]) - 1 if body else last
            rows = [row.strip() for row in self.lines[first - 1 : last]]
            line = " ".join(filter(None, rows))
            if old.issuperset(rows) or "#" in line or '"""' in line:
                continue
            line = re.sub(r"(?<=[(\[{]) |,? (?=[)\]}])", "", line)
            line = " " * node.col_offset + line + "\n"
            if len(line) <= WIDTH + 1:
                edits.append((self.starts[first - 1], self.starts[last], line))
        return edits


def _reach(block: list[Any], name: str) -> tuple[list[Any], bool]:
    """What reads a parameter's own value, and whether nothing else can."""
    parts: list[Any] = []
    for s in block:
        if name in map(_binding, ast.walk(s)):
            inner = map(_binding, ast.walk(getattr(s, "value", s)))
            if isinstance(s, ast.Assign) and name not in inner:
                return [*parts, s.value], True
            return [*parts, s.test] if isinstance(s, ast.If) else parts, False
        parts.append(s)
    return parts, True


def _reads(parts: list[Any], name: str | None = None) -> list[Any]:
    nodes = itertools.chain(*map(ast.walk, parts))
    loads = [n for n in nodes if isinstance(getattr(n, "ctx", 0), ast.Load)]
    return [n for n in loads if hasattr(n, "id") and name in (None, n.id)]


def _binding(node: Any) -> str | None:
    stores = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
    own = getattr(node, "id", None) if stores else None
    return node.arg if isinstance(node, ast.arg) else own


def _constant(node: Any) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN
    return value if isinstance(value, CONSTANTS) else UNKNOWN


def _arguments(node: Any, namespace: Given) -> tuple[Any, dict[str, Any]]:
    """The library's function that is called by its name, and what it gets."""
    match node:
        case ast.Call(ast.Name(name), args, keywords):
            raw = getattr(namespace.get(name), "fn", namespace.get(name))
            starred = re.search(r"[(,] ?\*", ast.unparse(node))
            ours = str(getattr(raw, "__module__", "")).startswith("fastw")
            if ours and inspect.isfunction(raw) and not starred:
                named = {str(k.arg): k.value for k in keywords}
                items = inspect.signature(raw).bind_partial(*args, **named)
                return raw, items.arguments
    return None, {}
