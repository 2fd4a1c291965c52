"""The deletion of checkpoints and their data, and the marks that show it to other processes."""
