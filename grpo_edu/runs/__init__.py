"""A training run on disk: request, folder, log, checkpoints, summary, profiles and trackers."""
