"""The command `prefect-torch`: what a person at a terminal sees of runs, and does with their checkpoints.

Importing any of its modules imports neither prefect nor torch; a saved block, and `doctor`, import what they look at.
"""
