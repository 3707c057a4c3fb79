"""What the notebooks investigate: faulty runs, reward exploits, statistical power and sweeps."""
