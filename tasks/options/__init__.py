"""The options of a training, in code, in a form or in Prefect's settings."""
