"""Continual learning: supervised and GRPO stages, Fisher information, EWC, forgetting and curricula."""
