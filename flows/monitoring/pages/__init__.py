"""What Prefect's UI shows of a run: its summary, its checkpoints, its progress."""
