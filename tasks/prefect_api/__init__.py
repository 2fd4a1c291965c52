"""Prefect's server, clients, settings and states as trainings and flows use them; independent of trainings."""
