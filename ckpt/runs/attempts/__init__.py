"""Who leads a run: its attempts, their claims and owners, and how they stand."""
