"""What a user sets for a training, in code, in a form or in Prefect's settings."""
