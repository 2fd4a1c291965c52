"""Scratch directories, memory, processes and mounts of this machine, whatever the storage."""
