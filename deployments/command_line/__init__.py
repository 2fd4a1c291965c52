"""The command `prefect-torch`, for runs and their checkpoints, for a machine, and for code written for Ray.

Importing its modules imports neither prefect nor torch, except `execution`. Opening a saved block imports prefect, and
`doctor` both.
"""
