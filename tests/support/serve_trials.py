"""Serve a deployment whose flow runs are the trials of a sweep, in a process of its own: serve_trials.py NAME."""

import sys

from prefect_torch.deployments import make_deployment, serve

if __name__ == "__main__":
    serve(make_deployment(sys.argv[1], "json:loads"))
