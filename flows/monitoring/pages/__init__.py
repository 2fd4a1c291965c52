"""The pages of a run in Prefect's UI: its summary, its checkpoints, its progress."""
