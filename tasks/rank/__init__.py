"""What runs in the process of a rank; imports neither prefect nor the other folders of tasks."""
