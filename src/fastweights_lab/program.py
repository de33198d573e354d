"""The one program of Fast Weights: ``fastweights COMMAND``.

``COMMAND --help`` says more. ``python -m fastweights COMMAND`` is the same.
What does not fit is one line, and the exit status 2; that of a run that
broke off is 1, and that of Ctrl-C 130.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from typing import Any, NoReturn

COMMANDS = {
    "train": "train a small language model",
    "generate": "let a saved model write",
    "experiments": (
        "train small models on tasks that ask what a state can hold"
    ),
    "compare": "train one language model with other layers in it",
    "bench": "measure time, memory and growth",
    "info": "say what is here, and which backend operators take",
}
"""By name what a command does: the module of that name in ``commands``.

It is imported when its command is asked for. Its docstring is the help's,
``add_arguments(parser)`` adds its arguments, and ``run(arguments)`` returns
the exit status, or None for 0.
"""


class Parser(argparse.ArgumentParser):
    """A parser that keeps the lines of a description, and errs in one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(*arguments, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists what there is\n")


def parser(command: str) -> Parser:
    """The parser of all commands, with the arguments of the one named."""
    of_all = Parser("fastweights", description=__doc__)
    commands = of_all.add_subparsers(
        dest="command", metavar="COMMAND", required=True
    )
    for name, about in COMMANDS.items():
        one = commands.add_parser(name, help=about)
        if name == command:
            found = importlib.import_module(f"fastweights_lab.commands.{name}")
            one.description = found.__doc__
            found.add_arguments(one)
            one.set_defaults(run=found.run)
    return of_all


def main(*words: str) -> int:
    """Run a command; without ``words``, that of the command line."""
    given = list(words) or sys.argv[1:]
    try:
        args = parser(given[0] if given else "").parse_args(
            given, argparse.Namespace(words=given)
        )
        return args.run(args) or 0
    except KeyboardInterrupt:
        return ended("stopped at once", 130)
    except BrokenPipeError:  # whoever read this has left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImportError, OSError, TypeError, ValueError) as error:
        named = isinstance(error, OSError | ImportError)
        if not named and not re.match(r"\S+: ", str(error)):
            raise  # not of an argument: a mistake of ours
        status = 1 if isinstance(error, ChildProcessError) else 2
        return ended(f"fastweights {given[0]}: {error}", status)


def ended(said: str, status: int) -> int:
    """Say in one line why; of torchrun's processes the first one does."""
    if os.environ.get("RANK", "0") == "0":
        print(" ".join(said.split()), file=sys.stderr)
    return status
