"""What the ranks of a training do together to make a checkpoint."""
