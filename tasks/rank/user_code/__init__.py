"""The user's code: packed in the process that starts a training, found again in a rank."""
