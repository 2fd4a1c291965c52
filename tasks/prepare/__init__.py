"""What the user's training function calls to prepare its model and its data; imports torch, never prefect."""
