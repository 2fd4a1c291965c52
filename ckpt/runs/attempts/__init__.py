"""The leadership of a run: its attempts, their claims and owners, and their status."""
