"""The commands that show stored runs and maintain their checkpoints."""
