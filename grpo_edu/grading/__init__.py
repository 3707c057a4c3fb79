"""Grading a class's submissions. Needs the extra `classroom`."""
