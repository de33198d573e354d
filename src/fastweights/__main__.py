"""The program, which is the laboratory's: ``python -m fastweights``."""

import sys

from fastweights_lab.program import main

if __name__ == "__main__":
    sys.exit(main())
