"""Serve a deployment whose parameters a test gives, in a process of its own."""

from prefect_torch.deployments import make_deployment, serve

if __name__ == "__main__":
    serve(make_deployment("cancelled-by-a-test", "json:loads"))
