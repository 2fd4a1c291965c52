"""What the process of a rank does around the call of the user's function, in the order of `main`."""
