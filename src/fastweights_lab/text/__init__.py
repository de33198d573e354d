"""Language models on text: corpus, training run, comparisons, probes."""
