"""What this computer can do: hardware, threads, start-up time and the speed of a training step."""
