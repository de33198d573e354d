"""``fastweights experiments``, by the name of its package."""

import sys

from fastweights_lab.program import main

sys.exit(main("experiments", *sys.argv[1:]))
