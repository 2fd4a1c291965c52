"""Commands on what a training reports: its metrics, as a table, as curves, and live."""
