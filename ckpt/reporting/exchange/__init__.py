"""The messages between ranks, under keys that they share; knows no checkpoint."""
