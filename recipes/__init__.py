"""How the shipped models and problems were made: the corpus, the pretraining of `tiny`, the cold start of `halfway`."""
