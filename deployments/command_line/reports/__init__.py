"""Commands that show the reports of a training: its metrics, as a table, as curves, and live."""
