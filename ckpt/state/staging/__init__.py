"""The memory that states are copied into, and the copies; independent of names and plans."""
