"""What a folded cell holds, for pages and notebooks alike."""

import ast


def holds(source: str) -> str:
    """Its kind: "exercise" (a check), "figure", "imports" alone, or "code"."""
    if "@exercise" in source:
        return "exercise"
    if "draw(" in source:
        return "figure"
    try:
        lines = ast.parse(source).body
    except SyntaxError:  # a magic
        return "code"
    only = all(isinstance(x, ast.Import | ast.ImportFrom) for x in lines)
    return "imports" if lines and only else "code"
