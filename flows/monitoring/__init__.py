"""Observers of a training: pages in Prefect's UI, events for automations, and progress at a terminal."""
