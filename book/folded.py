"""What a folded cell holds, for pages and notebooks alike."""

import ast

SETTINGS = ast.Assign | ast.Expr | ast.If


def holds(source: str) -> str:
    """Its kind: "exercise" (a check), "figure", "film", "imports" or "code".

    Imports may be followed by fewer lines of settings.
    """
    if "@exercise" in source:
        return "exercise"
    if "film.show(" in source:
        return "film"
    if "draw(" in source:
        return "figure"
    try:
        lines = ast.parse(source).body
    except SyntaxError:  # a magic
        return "code"
    imports = [x for x in lines if isinstance(x, ast.Import | ast.ImportFrom)]
    others = [x for x in lines if x not in imports]
    settings = all(isinstance(x, SETTINGS) for x in others)
    first = lines[:1] == imports[:1]
    only = first and settings and len(imports) > len(others)
    return "imports" if only else "code"
