"""A function's source with what is settled already left out of it.

The library writes each stage once for the whole family. :func:`specialise`
cuts its source down to one member: branches whose test the given values
decide are dropped or dedented, parameters and variables that are None
disappear, and so do calls such as ``decayed(x, None)``, which return one of
their arguments. All other lines, comments included, stay as they stand in
the file.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import keyword
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Given = Mapping[str, Any]
Edit = tuple[int, int, str]
Named = dict[str, Any]

WIDTH = 79
CONSTANTS = (bool, int, float, str, type(None))
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
LOOPS = (ast.For, ast.While, ast.With)
ATOMS = (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Call)
GROUPS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.GeneratorExp)
CHECKS = re.compile(r"_?(check|need|refuse|wrong)(_\w+)?")
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

    Args:
        objects: functions, classes or Triton kernels of the library.
        given: what is known, as a constant per parameter, variable or
            expression: ``{"beta": None, "causal": True,
            "G.shape[-1]": 1, "g is None": False}``. A call from one object
            to another loses the parameters that the other loses.
        docstring: True for whole docstrings, "summary" for their first
            paragraphs, False for none.
        checks: False leaves out the lines that check arguments.

    Raises:
        TypeError: a value of ``given`` is no constant.
        ValueError: ``given`` has a name that occurs in none of the objects,
            or one object gives another a parameter that is left out of it.
    """
    if docstring not in (True, False, "summary"):
        raise ValueError(
            f'docstring: got {docstring!r}, need True, False or "summary"'
        )
    given = dict(given or {})
    for name, value in given.items():
        if not isinstance(value, CONSTANTS):
            kind = type(value).__name__
            raise TypeError(f"given[{name!r}]: got {kind}, need a constant")
    present = [occurring(source(obj), given) for obj in objects]
    for name in given:
        if not any(name in names for names in present):
            shown = ", ".join(_name(obj) for obj in objects)
            raise ValueError(
                f"given: got {name!r}, need a parameter, variable or "
                f"expression of {shown}"
            )
    texts = []
    dropped: dict[Any, Named] = {}
    for obj, names in zip(objects, present, strict=True):
        part = {name: given[name] for name in names}
        text = reduce(source(obj), part, _globals(obj), checks)
        if part and isinstance(_tree(text).body[0], ast.FunctionDef):
            text = without_none(text, part)
            text, gone = without_parameters(text, part)
            dropped[_raw(obj)] = gone
        texts.append(text)
    for i, obj in enumerate(objects):
        text = without_arguments(texts[i], dropped, _globals(obj), _name(obj))
        if docstring is not True:
            text = without_docstrings(text, keep=docstring == "summary")
        texts[i] = tidy(text, source(obj))
        compile(texts[i], _name(obj), "exec")
    return texts


def occurring(text: str, given: Given) -> list[str]:
    """The keys of ``given`` that name something in the text."""
    found = []
    tree = _tree(text)
    names = {arg.arg for arg in _all(tree, ast.arg)}
    names |= {name.id for name in _all(tree, ast.Name)}
    expressions = {_key(n)[0] for n in ast.walk(tree) if _is_expr(n)}
    for key in given:
        try:
            expression = ast.parse(key, mode="eval").body
        except SyntaxError:
            continue
        if key in names or _key(expression)[0] in expressions:
            found.append(key)
    return found


def reduce(
    text: str, given: Given, namespace: Named, checks: bool = True
) -> str:
    """Apply the rules below until none of them applies."""
    original = Listing(text, {}, namespace)
    while True:
        listing = Listing(text, given, namespace, original)
        edits = None if checks else listing.check()
        edits = edits or (listing.edits() if given or not checks else None)
        if not edits:
            return text
        text = _applied(text, edits)


class Listing:
    """A text, its tree, and what is known at each name in it."""

    def __init__(
        self,
        text: str,
        given: Given,
        namespace: Named,
        original: Listing | None = None,
    ) -> None:
        self.text, self.given, self.namespace = text, given, namespace
        self.tree = _tree(text)
        self.original = original or self
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines()
        self.parents = {
            child: node
            for node in ast.walk(self.tree)
            for child in ast.iter_child_nodes(node)
        }
        self.functions = list(_all(self.tree, ast.FunctionDef))
        self.known: dict[ast.AST, Any] = {}
        self.forced: Named = {}
        self.keyed: Named = {}
        self.loads, self.stores = _uses(self.tree)
        parameters = {arg.arg for arg in _all(self.original.tree, ast.arg)}
        for name, value in given.items():
            if name in parameters:
                continue
            if name.isidentifier() and self.original.stores.get(name):
                self.forced[name] = value
            else:
                key, positive = _key(ast.parse(name, mode="eval").body)
                self.keyed[key] = bool(value) == positive
                if positive:
                    self.keyed[key] = value
        for function in self.functions:
            if not isinstance(self.parents[function], ast.FunctionDef):
                self.block(function.body, self.entering(function))

    def entering(self, function: ast.FunctionDef) -> Named:
        """What is known when the function starts."""
        arguments = {
            arg.arg for arg in _all(self.original.tree, ast.arg)
        }  # a parameter that is gone from the text was known as well
        return {n: v for n, v in self.given.items() if n in arguments}

    # What is known where.

    def block(self, statements: list[ast.stmt], env: Named) -> bool:
        """Note what is known in the statements; whether they end early."""
        return any(self.statement(s, env) for s in statements)

    def statement(self, s: ast.stmt, env: Named) -> bool:
        if isinstance(s, ast.Assign):
            self.expression(s.value, env)
            for target in s.targets:
                self.expression(target, env)  # indices are read
                self.assign(target, s.value, env)
        elif isinstance(s, ast.If):
            self.expression(s.test, env)
            sides = [dict(env), dict(env)]
            ended = [
                self.block(part, side)
                for part, side in zip((s.body, s.orelse), sides, strict=True)
            ]
            left = [e for e, end in zip(sides, ended, strict=True) if not end]
            both = left[0] if left else {}
            for other in left[1:]:
                both = {
                    n: v
                    for n, v in both.items()
                    if n in other and _same(other[n], v)
                }
            env.clear()
            env.update(both)
            return not left
        elif isinstance(s, (*LOOPS, ast.Try)):
            for name in _uses(s)[1]:
                env.pop(name, None)
            for child in ast.iter_child_nodes(s):
                if _is_expr(child):
                    self.expression(child, env)
                elif isinstance(child, ast.withitem):
                    self.expression(child.context_expr, env)
            inner = dict(env)
            if isinstance(s, ast.For):
                for i in self.none_pairs(s):
                    inner[s.target.elts[i].id] = None  # type: ignore
            for part in ("body", "handlers", "orelse", "finalbody"):
                for child in getattr(s, part, []):
                    if isinstance(child, ast.ExceptHandler):
                        self.block(child.body, dict(inner))
                    else:
                        self.statement(child, inner)
        elif isinstance(s, ast.FunctionDef):
            self.block(s.body, self.inside(s.args, s, env))
        elif not isinstance(s, ast.AnnAssign) or s.value is not None:
            for child in ast.iter_child_nodes(s):
                if child is not getattr(s, "annotation", None):
                    self.expression(child, env)
            for name in _uses(s)[1]:
                env.pop(name, None)
        return isinstance(s, ENDS)

    def assign(self, target: ast.expr, value: ast.expr, env: Named) -> None:
        if isinstance(target, ast.Name):
            found = self.value(value)
            if found is None or self.restated(target.id, found):
                env[target.id] = found
            else:
                env.pop(target.id, None)
        elif isinstance(target, ast.Tuple):
            values: list[Any] = [value] * len(target.elts)
            if isinstance(value, ast.Tuple) and len(value.elts) == len(values):
                values = value.elts
            for t, v in zip(target.elts, values, strict=True):
                if v is value:
                    for name in _uses(t)[1]:
                        env.pop(name, None)
                else:
                    self.assign(t, v, env)

    def inside(self, arguments: Any, node: ast.AST, env: Named) -> Named:
        hidden = {arg.arg for arg in _all(arguments, ast.arg)}
        hidden |= set(_uses(node)[1])
        return {n: v for n, v in env.items() if n not in hidden}

    def expression(self, node: ast.AST, env: Named) -> None:
        if isinstance(node, ast.JoinedStr):
            return  # its columns are wrong before Python 3.12
        if isinstance(node, ast.Lambda):
            env = self.inside(node.args, node.args, env)
            self.expression(node.body, env)
            return
        if hasattr(node, "generators"):  # of a comprehension
            self.expression(node.generators[0].iter, env)
            env = self.inside(node, node, env)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            for values in (self.forced, env):
                if node.id in values:
                    self.known[node] = values[node.id]
                    return
        for child in ast.iter_child_nodes(node):
            self.expression(child, env)

    def value(self, node: ast.AST) -> Any:
        """The constant that an expression is, or UNKNOWN."""
        if node in self.known:
            return self.known[node]
        if self.keyed and _is_expr(node):
            key, positive = _key(node)
            if key in self.keyed:
                found = self.keyed[key]
                return found if positive else not found
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self.truth(node.operand)
            return UNKNOWN if truth is UNKNOWN else not truth
        if isinstance(node, ast.BoolOp):
            truths = [self.truth(operand) for operand in node.values]
            decides = isinstance(node.op, ast.Or)
            if any(truth is decides for truth in truths):
                return decides
            return UNKNOWN if UNKNOWN in truths else not decides
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self.compared(node.left, node.ops[0], node.comparators[0])
        if isinstance(node, ast.IfExp):
            truth = self.truth(node.test)
            if truth is not UNKNOWN:
                return self.value(node.body if truth else node.orelse)
        if isinstance(node, ast.Call):
            answer = self.inlined(node)
            if answer is not None:
                value = answer.value if isinstance(answer, Value) else answer
                return value if answer is not value else self.value(answer)
        return UNKNOWN

    def truth(self, node: ast.AST) -> Any:
        value = self.value(node)
        return UNKNOWN if value is UNKNOWN else bool(value)

    def compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        a, b = self.value(left), self.value(right)
        if a is UNKNOWN or b is UNKNOWN:
            return UNKNOWN
        if isinstance(op, (ast.Is, ast.Eq)):
            return _same(a, b)
        if isinstance(op, (ast.IsNot, ast.NotEq)):
            return not _same(a, b)
        return UNKNOWN

    def function(self, node: ast.Call) -> Any:
        """The library's function that is called, or None."""
        return _function(node, self.namespace)

    def inlined(self, node: ast.Call) -> Any:
        """The argument, or the Value, that a call is; None if neither."""
        function = self.function(node)
        arguments = _bound(function, node) if function else None
        if not arguments:
            return None
        values = {name: self.value(arg) for name, arg in arguments.items()}
        constants = {n: v for n, v in values.items() if _is_constant(v)}
        if not constants:
            return None
        answer = answers(function, tuple(constants.items()))
        if not isinstance(answer, str):
            return answer
        others = [arg for n, arg in arguments.items() if n != answer]
        if answer not in arguments or any(_calls(arg) for arg in others):
            return None
        return arguments[answer]

    def none_pairs(self, loop: ast.For) -> list[int]:
        """Which targets are None in ``for a, b in each_chunk(x, None)``."""
        call, target = self.iterated(loop.iter), loop.target
        if (
            call is None
            or not isinstance(target, ast.Tuple)
            or call.keywords
            or len(call.args) != len(target.elts)
            or not all(isinstance(t, ast.Name) for t in target.elts)
            or not keeps_none(self.function(call))
        ):
            return []
        return [i for i, a in enumerate(call.args) if self.value(a) is None]

    def iterated(self, node: ast.AST) -> ast.Call | None:
        """The call behind reversed(list(chunks)), chunks = each_chunk()."""
        while True:
            if isinstance(node, ast.Name):
                if self.loads[node.id] != 1 or self.stores.get(node.id) != 1:
                    return None
                values = [
                    a.value
                    for a in _all(self.tree, ast.Assign)
                    if [ast.unparse(t) for t in a.targets] == [node.id]
                ]
                if not values:
                    return None
                node = values[0]
            elif not isinstance(node, ast.Call):
                return None
            elif ast.unparse(node.func) in ("reversed", "list"):
                node = node.args[0]
            else:
                return node

    # The rules: each returns edits of the text, or None.

    def edits(self) -> list[Edit] | None:
        for rule in (
            self.decided,
            self.unreachable,
            self.settled,
            self.folded,
            self.substituted,
            self.unpaired,
            self.copied,
            self.dead,
        ):
            for node in ast.walk(self.tree):
                edits = rule(node)
                if edits:
                    return edits
        return None

    def check(self) -> list[Edit] | None:
        """Leave out a statement that does nothing but check arguments."""
        for node in ast.walk(self.tree):
            checks = isinstance(node, ast.Assert)
            if isinstance(node, ast.Expr):
                checks = _is_check(node)
            elif isinstance(node, ast.If) and not node.orelse:
                *before, last = node.body
                checks = _is_check(last) and not self.is_elif(node)
                checks &= all(isinstance(s, ast.Assign) for s in before)
            if checks:
                assert isinstance(node, ast.stmt)
                return self.removed(node)
        return None

    def decided(self, node: ast.AST) -> list[Edit] | None:
        """An if statement whose test is known: one branch stays."""
        if not isinstance(node, ast.If):
            return None
        truth = self.truth(node.test)
        if truth is UNKNOWN:
            return None
        stays = node.body if truth else node.orelse
        if self.is_elif(node):
            if not stays:
                return [self.rows(node.lineno, node.end_lineno)]
            start = self.starts[node.lineno - 1]
            indent = " " * node.col_offset
            if truth:
                first, last = self.body_rows(node.body)
                body = "".join(self.kept(first, last, 0))
                new = f"{indent}else:\n{body}"
            else:
                new = self.orelse(node)
            return [(start, self.starts[node.end_lineno or 0], new)]
        if not stays:
            return self.removed(node)
        first, last = self.body_rows(stays)
        if not truth and len(stays) == 1 and self.is_elif(stays[0]):
            new = self.orelse(node).replace("elif", "if", 1)
        else:
            depth = stays[0].col_offset - node.col_offset
            new = "".join(self.kept(first, last, depth))
        start = self.starts[node.lineno - 1]
        return [(start, self.starts[node.end_lineno or 0], new)]

    def orelse(self, node: ast.If) -> str:
        """The rest of an if statement, from its elif or else on."""
        row = node.body[-1].end_lineno or 0
        while not re.match(r"\s*(elif\b|else\b)", self.lines[row]):
            row += 1
        return "".join(self.kept(row + 1, node.end_lineno or 0, 0))

    def unreachable(self, node: ast.AST) -> list[Edit] | None:
        """Statements behind a return, which the file does not have."""
        for part in ("body", "orelse"):
            statements = getattr(node, part, None)
            if not isinstance(statements, list):
                continue
            for s in statements[:-1]:
                if isinstance(s, ENDS):
                    last = statements[-1].end_lineno
                    return [self.rows((s.end_lineno or 0) + 1, last)]
        return None

    def settled(self, node: ast.AST) -> list[Edit] | None:
        """An assignment of None that every reader of the name knows."""
        if not isinstance(node, ast.Assign):
            return None
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        if len(names) < len(node.targets):
            return None
        if all(name in self.forced for name in names):
            return self.removed(node)
        value = self.value(node.value)
        if value is not None and not self.restated(names[0], value):
            return None
        if all(
            (self.stores[n] == 1 and n not in self.given)
            or self.restated(n, value)
            for n in names
        ) and not any(self.unknown_loads(n) for n in names):
            if any(self.loads.get(n) for n in names):
                return None  # until they are substituted
            return self.removed(node)
        if all(self.overwritten(node, name) for name in names):
            return self.removed(node)
        return None

    def restated(self, name: str, value: Any) -> bool:
        return name in self.given and _same(self.given[name], value)

    def unknown_loads(self, name: str) -> bool:
        return any(
            n.id == name and isinstance(n.ctx, ast.Load)
            for n in _all(self.tree, ast.Name)
            if n not in self.known and not self.in_annotation(n)
        )

    def overwritten(self, node: ast.Assign, name: str) -> bool:
        """Whether a later statement of the block assigns before reading."""
        statements = self.siblings(node)
        return _assigned(statements[statements.index(node) + 1 :], name)

    def folded(self, node: ast.AST) -> list[Edit] | None:
        """An expression of which a part is known."""
        if isinstance(node, ast.IfExp):
            truth = self.truth(node.test)
            if truth is not UNKNOWN:
                return self.replaced(node, node.body if truth else node.orelse)
        if isinstance(node, ast.BoolOp):
            return self.shorter(node)
        if isinstance(node, ast.Call):
            answer = self.inlined(node)
            if isinstance(answer, Value):
                return [(*self.span(node), repr(answer.value))]
            if answer is not None:
                return self.replaced(node, answer)
            return self.defaulted(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for one, other in (
                (node.left, node.right),
                (node.right, node.left),
            ):
                if one in self.known and _is_one(self.known[one]):
                    return self.replaced(node, other)
        return None

    def shorter(self, node: ast.BoolOp) -> list[Edit] | None:
        """``a and b`` without the operands that do not matter."""
        if self.value(node) is not UNKNOWN:
            return None
        for i, operand in enumerate(node.values):
            if self.truth(operand) is UNKNOWN:
                continue
            if len(node.values) == 2:
                return self.replaced(node, node.values[1 - i])
            spans = [self.grouped(v) for v in node.values]
            return [_without(spans, i)]
        return None

    def defaulted(self, node: ast.Call) -> list[Edit] | None:
        """A known argument that is the parameter's default."""
        function = self.function(node)
        arguments = _bound(function, node) if function else None
        if not arguments:
            return None
        parameters = inspect.signature(function).parameters
        for name, arg in arguments.items():
            last = node.args[-1:] == [arg] and not node.keywords
            by_name = any(k.value is arg for k in node.keywords)
            default = parameters[name].default
            if arg not in self.known or not (last or by_name):
                continue
            if _is_constant(default) and _same(self.known[arg], default):
                return [self.without_argument(node, arg)]
        return None

    def substituted(self, node: ast.AST) -> list[Edit] | None:
        """A name that is known, by its value."""
        if node in self.known:
            return [(*self.span(node), repr(self.known[node]))]
        return None

    def unpaired(self, node: ast.AST) -> list[Edit] | None:
        """Pairs of a target and a value that nothing reads any more."""
        if isinstance(node, ast.For):
            pairs = self.none_pairs(node)
            if not pairs:
                return None
            call = self.iterated(node.iter)
            assert isinstance(node.target, ast.Tuple) and call is not None
            targets, values = node.target.elts, call.args
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if not isinstance(target, ast.Tuple) or not isinstance(
                value, ast.Tuple
            ):
                return None
            targets, values = target.elts, value.elts
            pairs = [i for i, v in enumerate(values) if not _calls(v)]
        else:
            return None
        least = 3 if isinstance(node, ast.For) else 2
        if len(targets) < least or len(targets) != len(values):
            return None
        for i in pairs:
            name = targets[i]
            if isinstance(name, ast.Name) and self.unread(name.id):
                return [
                    _without([self.grouped(t) for t in targets], i),
                    _without([self.grouped(v) for v in values], i),
                ]
        return None

    def unread(self, name: str) -> bool:
        """Whether nothing reads what the original text reads."""
        return not self.loads.get(name) and bool(self.original.loads.get(name))

    def copied(self, node: ast.AST) -> list[Edit] | None:
        """``a = b`` that arose here: b where a is read."""
        if not (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Name)
        ):
            return None
        new, old = node.targets[0].id, node.value.id
        arguments = {arg.arg for arg in _all(self.tree, ast.arg)}
        for name in (new, old):
            if self.stores.get(name, 0) + (name in arguments) != 1:
                return None
        for other in _all(self.original.tree, ast.Assign):
            if ast.dump(other) == ast.dump(node):
                return None
        for load in _all(self.tree, ast.Name):
            if load.id == new and isinstance(load.ctx, ast.Load):
                return [(*self.span(load), old)]
        return self.removed(node)

    def dead(self, node: ast.AST) -> list[Edit] | None:
        """An assignment that nothing reads any more; an empty loop."""
        if isinstance(node, LOOPS) and isinstance(node.body[0], ast.Pass):
            return self.removed(node)
        if not isinstance(node, ast.Assign) or _calls(node.value):
            return None
        if all(
            isinstance(t, ast.Name) and self.unread(t.id) for t in node.targets
        ):
            return self.removed(node)
        return None

    # Places in the text.

    def at(self, line: int, column: int) -> int:
        raw = self.lines[line - 1].encode()[:column]
        return self.starts[line - 1] + len(raw.decode())

    def span(self, node: Any) -> tuple[int, int]:
        start = self.at(node.lineno, node.col_offset)
        return start, self.at(node.end_lineno, node.end_col_offset)

    def grouped(self, node: ast.AST) -> tuple[int, int]:
        """The span with the parentheses around it that only group."""
        start, end = self.span(node)
        while True:
            before = self.text[:start].rstrip()
            after = self.text[end:]
            skipped = len(after) - len(after.lstrip())
            closes = end + skipped
            if not before.endswith("(") or self.text[closes] != ")":
                return start, end
            word = re.search(r"(\w+|[\])])$", before[:-1].rstrip(" "))
            if word and not keyword.iskeyword(word[1]):
                return start, end
            start, end = len(before) - 1, closes + 1

    def replaced(self, node: ast.AST, by: ast.AST) -> list[Edit]:
        """The edit that puts one node in the place of another around it."""
        start, end = self.grouped(node)
        inner = self.span(by)
        new = self.text[inner[0] : inner[1]]
        parent = self.parents[node]
        alone = (ast.Assign, ast.Return, ast.Call, ast.Tuple, ast.keyword)
        one_line = "\n" not in new and isinstance(parent, alone)
        if one_line or isinstance(by, (*ATOMS, *GROUPS)):
            return [(start, end, new)]
        return [(start, end, f"({new})")]

    def without_argument(self, call: ast.Call, arg: ast.expr) -> Edit:
        open_, spans, close = items(self.text, self.span(call.func)[1])
        place = self.span(arg)[0]
        for i, (start, end) in enumerate(spans):
            if start <= place < end:
                if len(spans) == 1:
                    return open_ + 1, close, ""
                return _without(spans, i)
        raise AssertionError("the argument is one of the call's")

    def siblings(self, node: ast.stmt) -> list[ast.stmt]:
        parent = self.parents[node]
        for part in ("body", "orelse", "finalbody"):
            statements = getattr(parent, part, None)
            if isinstance(statements, list) and node in statements:
                return statements
        raise AssertionError("a statement stands in a block")

    def is_elif(self, node: ast.stmt) -> bool:
        return isinstance(node, ast.If) and self.lines[
            node.lineno - 1
        ].lstrip().startswith("elif")

    def in_annotation(self, node: ast.AST) -> bool:
        while node in self.parents:
            parent = self.parents[node]
            if node is getattr(parent, "annotation", None):
                return True
            if node is getattr(parent, "returns", None):
                return True
            node = parent
        return False

    def rows(self, first: int, last: int | None) -> Edit:
        """The edit that removes these lines."""
        return self.starts[first - 1], self.starts[last or first], ""

    def removed(self, node: ast.stmt) -> list[Edit]:
        """Remove a statement and the comment above it."""
        parent = self.parents[node]
        if len(self.siblings(node)) == 1:
            if self.siblings(node) is getattr(parent, "orelse", None):
                row = node.lineno - 1
                while not re.match(r"\s*else\b", self.lines[row - 1]):
                    row -= 1
                return [self.rows(row, node.end_lineno)]
            if isinstance(parent, LOOPS):
                return self.removed(parent)
            return [(*self.span(node), "pass")]
        first = node.lineno
        indent = " " * node.col_offset + "#"
        while self.lines[first - 2].startswith(indent):
            first -= 1
        return [self.rows(first, node.end_lineno)]

    def body_rows(self, statements: list[ast.stmt]) -> tuple[int, int]:
        """The lines of a block, with the comments above it."""
        first, last = statements[0].lineno, statements[-1].end_lineno
        indent = " " * statements[0].col_offset + "#"
        while self.lines[first - 2].startswith(indent):
            first -= 1
        return first, last or first

    def kept(self, first: int, last: int, depth: int) -> Iterator[str]:
        """These lines, dedented; what a string holds stays as it is."""
        fixed = _string_rows(self.text)
        for row in range(first, last + 1):
            line = self.text[self.starts[row - 1] : self.starts[row]]
            yield (
                line
                if row in fixed
                else line[depth:].lstrip(
                    "" if line[:depth].strip() == "" else " "
                )
            )


class Value:
    """A constant that a call returns."""

    def __init__(self, value: Any) -> None:
        self.value = value


@functools.cache
def answers(function: Any, constants: tuple[tuple[str, Any], ...]) -> Any:
    """What the function returns if that is a parameter (its name) or a Value.

    None if it has more to do than that.
    """
    if function in _under_way:
        return None
    _under_way.append(function)
    try:
        text = reduce(source(function), dict(constants), _globals(function))
    finally:
        _under_way.remove(function)
    definition = _tree(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body
    if ast.get_docstring(definition) is not None:
        body = body[1:]
    if len(body) != 1 or not isinstance(body[0], ast.Return):
        return None
    value = body[0].value
    if value is None:
        return Value(None)
    if isinstance(value, ast.Constant):
        return Value(value.value)
    parameters = inspect.signature(function).parameters
    if isinstance(value, ast.Name) and value.id in parameters:
        return value.id
    return None


_under_way: list[Any] = []


@functools.cache
def keeps_none(function: Any) -> bool:
    """Whether f(*args) yields lists that have None where args have it."""
    if function is None:
        return False
    tree = _tree(source(function))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    vararg = definition.args.vararg
    yields = list(_all(tree, ast.Yield))
    if vararg is None or definition.args.args or len(yields) != 1:
        return False
    match yields[0].value:
        case ast.ListComp(
            elt=ast.IfExp(
                test=ast.Compare(left=ast.Name(x), ops=[ast.Is()]),
                body=ast.Constant(None),
            ),
            generators=[
                ast.comprehension(target=ast.Name(y), iter=ast.Name(z))
            ],
        ):
            return x == y and z == vararg.arg
    return False


def without_none(text: str, given: Given) -> str:
    """``G: Gates | None`` as ``G: Gates`` where G is said to be given."""
    for name in [n for n, value in given.items() if value is False]:
        listing = Listing(text, {}, {})
        arguments = listing.functions[0].args
        plain = len(arguments.args) - len(arguments.defaults)
        for arg in arguments.args[:plain]:
            match arg.annotation:
                case ast.BinOp(left, ast.BitOr(), ast.Constant(None)):
                    if name == f"{arg.arg} is None":
                        edit = listing.replaced(arg.annotation, left)
                        text = _applied(text, edit)
    return text


def without_parameters(text: str, given: Given) -> tuple[str, Named]:
    """A function without the given parameters that it does not read."""
    gone: Named = {}
    for name, value in given.items():
        listing = Listing(text, {}, {})
        function = listing.functions[0]
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args]
        every += arguments.kwonlyargs
        found = [arg for arg in every if arg.arg == name]
        read = name in listing.loads and not _assigned(function.body, name)
        if not found or read:
            continue
        gone[name] = value
        row = listing.starts[function.lineno - 1]
        after = text.index(function.name, row) + len(function.name)
        open_, spans, close = items(text, after)
        place = listing.span(found[0])[0]
        words = [text[start:end] for start, end in spans]
        i = [start <= place < end for start, end in spans].index(True)
        if words[i - 1 : i] == ["*"] and i + 1 == len(words):
            text = _applied(text, [_without(spans, i)])
            open_, spans, close = items(text, after)
            i -= 1
        one = len(spans) == 1
        edit = (open_ + 1, close, "") if one else _without(spans, i)
        text = _applied(text, [edit])
    return text, gone


def without_arguments(
    text: str, dropped: dict[Any, Named], namespace: Named, caller: str
) -> str:
    """Calls without the arguments that the functions called have lost."""
    count = 0
    while True:
        listing = Listing(text, {}, namespace)
        calls = list(_all(listing.tree, ast.Call))
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        calls = [call for call in calls if listing.function(call) in dropped]
        if count == len(calls):
            return text
        call = calls[-1 - count]  # an inner call stands behind the outer one
        function = listing.function(call)
        bound = _bound(function, call) or {}
        lost = [
            arg for name, arg in bound.items() if name in dropped[function]
        ]
        for name, arg in reversed(bound.items()):
            if name not in dropped[function]:
                continue
            if not _same(listing.value(arg), dropped[function][name]):
                raise ValueError(
                    f"given: {function.__name__} is shown without {name}, "
                    f"but {caller} gives it {ast.unparse(arg)}"
                )
        places = [listing.span(arg)[0] for arg in lost]
        while places:
            place = places.pop()
            after = listing.span(call.func)[1]
            open_, spans, close = items(text, after)
            i = [start <= place < end for start, end in spans].index(True)
            one = len(spans) == 1
            edit = (open_ + 1, close, "") if one else _without(spans, i)
            text = _applied(text, [edit])
        count += 1


def without_docstrings(text: str, keep: bool) -> str:
    """Docstrings cut to their first paragraph, or left out."""
    count = 0
    while True:
        listing = Listing(text, {}, {})
        kinds = (ast.FunctionDef, ast.ClassDef)
        owners = [n for n in ast.walk(listing.tree) if isinstance(n, kinds)]
        if count == len(owners):
            return text
        owner = owners[count]
        count += 1
        if ast.get_docstring(owner) is None:
            continue
        node = owner.body[0]
        assert isinstance(node, ast.Expr)
        start, end = listing.span(node)
        paragraphs = listing.text[start:end].split("\n\n")
        if keep and len(paragraphs) > 1:
            text = _applied(text, [(start, end, paragraphs[0] + '"""')])
        elif not keep and len(owner.body) > 1:
            last = node.end_lineno or node.lineno
            while not listing.lines[last].strip():
                last += 1
            text = _applied(text, [listing.rows(node.lineno, last)])


def tidy(text: str, original: str) -> str:
    """Join what became short enough; no two blank lines in a function."""
    old = {line.strip() for line in original.splitlines()}
    done = 0
    while True:
        listing = Listing(text, {}, {})
        statements = list(_all(listing.tree, ast.stmt))
        if done == len(statements):
            break
        node = statements[done]
        done += 1
        first, last = _header(node)
        rows = listing.lines[first - 1 : last]
        if len(rows) < 2 or all(row.strip() in old for row in rows):
            continue
        if any("#" in row for row in rows) or '"""' in "".join(rows):
            continue
        new = _joined(rows)
        start, end = listing.starts[first - 1], listing.starts[last]
        text = _applied(text, [(start, end, "\n".join(new) + "\n")])
    text = re.sub(r"\n{3,}", "\n\n", text) if text.startswith("def") else text
    return re.sub(r"(:\n)\n+( +)", r"\1\2", text).rstrip()


def _header(node: ast.stmt) -> tuple[int, int]:
    """The lines of a statement up to its block."""
    body = getattr(node, "body", None)
    if not body:
        return node.lineno, node.end_lineno or node.lineno
    last = node.lineno
    for field, value in ast.iter_fields(node):
        if field not in ("body", "orelse", "decorator_list", "finalbody"):
            nodes = value if isinstance(value, list) else [value]
            for child in nodes:
                if isinstance(child, ast.AST):
                    ends = [
                        getattr(n, "end_lineno", 0) or 0
                        for n in ast.walk(child)
                    ]
                    last = max(last, *ends)
    # A closing bracket and the colon may stand on the line behind.
    return node.lineno, max(last, min(last + 1, body[0].lineno - 1))


def _joined(rows: list[str]) -> list[str]:
    """The lines of a statement as one line, or as three, if they fit."""
    indent = rows[0][: len(rows[0]) - len(rows[0].lstrip())]
    line = " ".join(row.strip() for row in rows if row.strip())
    line = re.sub(r"(?<=[(\[{]) ", "", line)
    line = re.sub(r",? (?=[)\]}])", "", line)
    if len(indent + line) <= WIDTH:
        return [indent + line]
    middle = [row for row in rows[1:-1] if row.strip()]
    closes = rows[-1].strip()
    inner = " ".join(row.strip() for row in middle)
    inner = re.sub(r",? (?=[)\]}])", "", re.sub(r"(?<=[(\[{]) ", "", inner))
    if (
        rows[0].endswith(("(", "[", "{"))
        and closes.startswith((")", "]", "}"))
        and not inner.endswith(",")
        and len(indent + inner) + 4 <= WIDTH
    ):
        return [rows[0], f"{indent}    {inner}", indent + closes]
    return [row for row in rows if row.strip()]


def items(text: str, start: int) -> tuple[int, list[tuple[int, int]], int]:
    """The bracket that opens at or behind start, and what commas part in it.

    Returns the place of the bracket, the spans, and the place of its end.
    """
    offset = text.index("(", start)
    starts = [0]
    part = text[offset:]
    for line in part.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    depth, spans, first, last = 0, [], -1, -1
    reader = io.StringIO(part).readline
    for token in tokenize.generate_tokens(reader):
        begin = offset + starts[token.start[0] - 1] + token.start[1]
        end = offset + starts[token.end[0] - 1] + token.end[1]
        if token.type in (tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE):
            continue
        if token.string in ("(", "[", "{") and token.type == tokenize.OP:
            depth += 1
            if depth == 1:
                continue
        if token.string in (")", "]", "}") and token.type == tokenize.OP:
            depth -= 1
        closes = depth == 0
        if closes or (depth == 1 and token.string == ","):
            if first >= 0:
                spans.append((first, last))
            first = -1
            if closes:
                return offset, spans, begin
            continue
        first = begin if first < 0 else first
        last = end
    raise AssertionError("a bracket closes")


def _without(spans: list[tuple[int, int]], i: int) -> Edit:
    """The edit that removes one item of a list, and its comma."""
    if i + 1 < len(spans):
        return spans[i][0], spans[i + 1][0], ""
    return spans[i - 1][1], spans[i][1], ""


def _applied(text: str, edits: list[Edit]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _all(node: ast.AST, kind: Any) -> Iterator[Any]:
    return (n for n in ast.walk(node) if isinstance(n, kind))


def _is_expr(node: ast.AST) -> bool:
    return isinstance(node, ast.expr)


def _is_constant(value: Any) -> bool:
    return isinstance(value, CONSTANTS)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _assigned(statements: list[ast.stmt], name: str) -> bool:
    """Whether the statements assign to the name before they read it."""
    for statement in statements:
        loads, stores = _uses(statement)
        if name in loads:
            return False
        if name in stores:
            return isinstance(statement, ast.Assign)
    return False


def _is_one(value: Any) -> bool:
    return value == 1 and not isinstance(value, bool)


def _calls(node: ast.AST) -> bool:
    kinds = (ast.Call, ast.Await, ast.Yield, ast.NamedExpr)
    return any(isinstance(n, kinds) for n in ast.walk(node))


def _uses(node: ast.AST) -> tuple[dict[str, int], dict[str, int]]:
    """How often each name is read and assigned, annotations aside."""
    loads: dict[str, int] = {}
    stores: dict[str, int] = {}
    todo = [node]
    while todo:
        n = todo.pop()
        if isinstance(n, ast.Name):
            counts = loads if isinstance(n.ctx, ast.Load) else stores
            counts[n.id] = counts.get(n.id, 0) + 1
        if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name):
            loads[n.target.id] = loads.get(n.target.id, 0) + 1
        for field, value in ast.iter_fields(n):
            if field not in ("annotation", "returns"):
                values = value if isinstance(value, list) else [value]
                todo += [v for v in values if isinstance(v, ast.AST)]
    return loads, stores


def _key(node: ast.AST) -> tuple[str, bool]:
    """An expression as a key; whether it says so or the contrary."""
    positive = True
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        contrary = {ast.IsNot: ast.Is(), ast.NotEq: ast.Eq()}
        op = contrary.get(type(node.ops[0]))
        if op is not None:
            node = ast.Compare(node.left, [op], node.comparators)
            positive = False
    return ast.dump(node), positive


def _is_check(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = ast.unparse(node.value.func).rpartition(".")[2]
        return CHECKS.fullmatch(name) is not None
    return isinstance(node, ast.Raise)


def _raw(obj: Any) -> Any:
    return getattr(obj, "fn", obj)


def _name(obj: Any) -> str:
    return str(getattr(_raw(obj), "__qualname__", obj))


def _globals(obj: Any) -> Named:
    return getattr(_raw(obj), "__globals__", {})


def _function(node: ast.Call, namespace: Named) -> Any:
    found: Any = None
    if isinstance(node.func, ast.Name):
        found = namespace.get(node.func.id)
    elif isinstance(node.func, ast.Attribute) and isinstance(
        node.func.value, ast.Name
    ):
        module = namespace.get(node.func.value.id)
        if inspect.ismodule(module):
            found = getattr(module, node.func.attr, None)
    found = _raw(found)
    own = getattr(found, "__module__", "") or ""
    ours = inspect.isfunction(found) and own.split(".")[0] == "fastweights"
    return found if ours and found.__name__ != "<lambda>" else None


def _bound(function: Callable[..., Any], node: ast.Call) -> Any:
    """The arguments of a call by the parameters' names, or None."""
    if any(isinstance(arg, ast.Starred) for arg in node.args):
        return None
    named = {k.arg: k.value for k in node.keywords}
    if None in named:
        return None
    signature = inspect.signature(function)
    try:
        bound = signature.bind_partial(*node.args, **named)  # type: ignore
    except TypeError:
        return None
    kinds = inspect.Parameter
    return {
        name: arg
        for name, arg in bound.arguments.items()
        if signature.parameters[name].kind
        not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    }


def _string_rows(text: str) -> set[int]:
    """The lines that begin inside a string."""
    rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            rows.update(range(token.start[0] + 1, token.end[0] + 1))
    return rows
