"""Which tensors are given which fate: rungs of the memory ladder, and checkpointed blocks."""
