"""What one sees of a training while it runs, and what automations are told of it."""
