"""Scratch directories, memory, processes, descriptors and mounts of this machine, whatever the storage."""
