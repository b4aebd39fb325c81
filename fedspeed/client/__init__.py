"""One client's turn: the flat model, the checked hooks of a method, the local loop, the block engine, scores."""
