"""A run on disk: `simulate(out=)`, resume, checkpoints, verify, fork, replay, diagnosis."""
