"""The program of a rank; imports neither prefect nor the other wings of tasks."""
