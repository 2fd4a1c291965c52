"""What this machine has, whatever the storage: scratch directories, memory, processes and mounts."""
