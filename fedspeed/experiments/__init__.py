"""Many runs: batch, sweep, tune, audit, Slurm."""
