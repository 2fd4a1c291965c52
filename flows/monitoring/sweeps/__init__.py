"""What Prefect's UI and a terminal show of a sweep: its trials, their curves, its parameters."""
