"""Commands on a sweep: its trials, instead of the checkpoints of a run."""
