"""Trainings that schedules and the Prefect UI start."""

from .training import make_deployment, serve

__all__ = ["make_deployment", "serve"]
