"""The command line. It may import every other room; no room imports it."""
