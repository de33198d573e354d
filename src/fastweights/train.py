"""The trainer, which is the laboratory's: ``python -m fastweights.train``."""

import sys

from fastweights_lab.text.train import main

if __name__ == "__main__":
    sys.exit(main())
