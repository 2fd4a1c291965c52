"""What deletes checkpoints and their data, and the marks by which others know of it."""
