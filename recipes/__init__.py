"""How the shipped models and problems were made: the corpus, the pretraining of `tiny`, and cold starts."""
