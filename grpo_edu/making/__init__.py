"""How the tiny models were made: the corpus and the pretraining recipe."""
