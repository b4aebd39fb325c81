"""Files, locks, digests, processes, registries, random streams and devices."""
