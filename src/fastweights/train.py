"""The trainer, as torchrun calls it: ``python -m fastweights.train``."""

import sys

from fastweights_lab.program import main

if __name__ == "__main__":
    sys.exit(main("train", *sys.argv[1:]))
