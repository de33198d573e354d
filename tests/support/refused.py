"""Calls that are refused, written as they would be seen.

    DeltaNet(8, True)
        TypeError: num_heads: got bool, need an int

A call stands at the margin, in as many lines as it needs, and its error
below, indented, up to where the test cares.
"""

import functools
import re

import pytest


def refused(text: str) -> pytest.MarkDecorator:
    """Give a test each ``wrong`` call, and its ``error``: makes a context that
    expects an error of that class, whose message begins with those words."""
    pattern = r"^(\S.*(?:\n\S.*)*)\n    (\w+): (.*(?:\n    .*)*)$"
    cases = []
    for call, kind, said in re.findall(pattern, text, re.M):
        words = re.escape(" ".join(said.split()))
        kinds = TypeError, ValueError, NotImplementedError
        [kind] = [x for x in kinds if x.__name__ == kind]
        error = functools.partial(pytest.raises, kind, match=f"^{words}")
        label = " ".join(call.split())
        cases.append(pytest.param(call, error, id=label))
    assert cases and text.count("\n    ") >= len(cases)
    return pytest.mark.parametrize("wrong, error", cases)
