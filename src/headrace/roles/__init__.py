"""The processes that hold a model: prefiller, decoder, colocated. Here alone engine and messenger meet."""
