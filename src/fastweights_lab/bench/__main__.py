"""``fastweights bench``, by the name of its package."""

import sys

from fastweights_lab.program import main

sys.exit(main("bench", *sys.argv[1:]))
