"""The display of a sweep in Prefect's UI and at a terminal: its trials, their curves, its parameters."""
