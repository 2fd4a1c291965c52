"""Prefect's server, clients, settings and states as flows use them; independent of trainings."""
