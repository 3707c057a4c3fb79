"""What instructors use: the exercises made from the masters, grading, the challenge, and a hub (extra `classroom`)."""
