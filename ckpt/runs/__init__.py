"""The records of one run: its checkpoints, attempts and metrics, and their deletion."""
