"""The steps of a rank's process around the call of the user's function, in the order of `main`."""
