"""The journal of a sweep: its entries, the events in them, and the trials that result from these."""
