"""Triggers of automations: events of a training's attempts and checkpoints, and each checkpoint as an asset."""
