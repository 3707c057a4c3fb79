"""More than one process: TRL's trainer, accelerate, DeepSpeed and Slurm."""
