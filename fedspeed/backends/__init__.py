"""Where jobs run. Every back end runs the same `run_client` and gives replies in job order: the same bits."""
