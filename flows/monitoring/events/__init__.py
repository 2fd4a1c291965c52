"""What automations can trigger on: events of a training's attempts and checkpoints, and each checkpoint as an asset."""
