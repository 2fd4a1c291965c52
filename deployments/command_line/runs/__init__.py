"""The commands that look at stored runs and look after their checkpoints."""
