"""Studies that take longer than a test: each a command that stores its results with what made them."""
