"""Programs that train round by round on command; see `benchmarks.protocol`."""
