"""The messages between ranks, under keys that they share; independent of checkpoints."""
