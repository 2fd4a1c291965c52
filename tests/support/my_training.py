"""A training function, to be deployed by its name."""


def train_fn(config):
    return config
