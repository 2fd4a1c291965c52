"""The study of a sweep: the only folder that imports Optuna, the extra `sweep`."""
