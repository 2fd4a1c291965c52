"""The machines of a training: the node agent on each, its link to the leader, and what the leader knows of it."""
