"""Prefect's server, clients, settings and states as flows use them; knows no training."""
