"""Run ``python -m fastweights_lab.bench``."""

from fastweights_lab.bench.program import main

main()
