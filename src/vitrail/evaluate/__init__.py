"""How good a model is, and what it can be used for: accuracy, few-shot, probes, VTAB, predictions, embeddings."""
