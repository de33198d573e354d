"""The program, which is the laboratory's: ``python -m fastweights``."""

import sys

from fastweights_lab.program import main

sys.exit(main())
