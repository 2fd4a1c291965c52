"""Prefect's embedded server: tied to the process that started it, and kept running until that process ends."""
