"""Who leads a run: its attempts, their claims and owners, and their status."""
