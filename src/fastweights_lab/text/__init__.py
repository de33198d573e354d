"""Language models on text: the corpus, and a training run on it."""
