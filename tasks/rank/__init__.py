"""The program of a rank; imports neither prefect nor the other subpackages of tasks."""
