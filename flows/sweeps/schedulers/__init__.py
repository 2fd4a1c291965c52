"""The schedulers of a sweep: pure functions from its history to what a trial does next."""
