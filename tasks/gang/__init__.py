"""Starting all ranks of an attempt, watching them and stopping them."""
