"""Functions that prepare the model and the data of a training function; imports torch, never prefect."""
