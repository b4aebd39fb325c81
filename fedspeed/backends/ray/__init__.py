"""The Ray back end: a pool of workers on the nodes of a cluster."""
