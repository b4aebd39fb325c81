"""Files, locks, hashes, processes, registries, random streams, devices."""
