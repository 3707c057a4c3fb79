"""What a first reading of the algorithm leaves out: what only some settings need, and what reads, checks and tests."""
