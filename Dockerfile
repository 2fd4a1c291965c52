# syntax=docker/dockerfile:1
# An image for trainings in Docker and Kubernetes work pools:
#
#     docker build --tag registry/train .                             # for NVIDIA GPUs
#     docker build --tag registry/train --build-arg DEVICE=cpu .      # gigabytes smaller
#
# Your own training goes on top of it: FROM registry/train, RUN pip install what it needs, COPY my_training.py /work/.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build

ARG DEVICE=gpu
ARG TORCH=2.13.0
# PyPI's torch for Linux brings CUDA; without a GPU, its CPU build is a tenth of the size.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN if [ "$DEVICE" = cpu ]; \
    then pip install "torch==$TORCH" --index-url https://download.pytorch.org/whl/cpu; \
    else pip install "torch==$TORCH"; \
    fi

WORKDIR /src
# What changes least first: an edit of the sources installs no dependency anew.
COPY constraints.txt ./
RUN pip install -c constraints.txt prefect-aws obstore lightning pandas
COPY pyproject.toml README.md LICENSE ./
COPY package package
COPY ckpt ckpt
COPY tasks tasks
COPY flows flows
COPY deployments deployments
RUN pip install -c constraints.txt ".[lightning,pandas]"


FROM python:${PYTHON}-slim

# tini passes SIGTERM on and reaps what ranks leave behind.
# libgomp1: torch's threads on the CPU. git: `prefect deploy` may pull code from a repository.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini libgomp1 git \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 trainer \
    && install --directory --owner trainer --group trainer /work
# The user's own, for `RUN pip install` in images on top of this one.
COPY --from=build --chown=trainer:trainer /opt/venv /opt/venv

# PYTHONPATH: train_fn="my_training:train_fn" is found beside where the flow runs, whatever starts it.
# SIGTERM_BEHAVIOR: unless told so, what Prefect starts in a container ends at once on SIGTERM, and the flow is killed with it.
# Told so, as Kubernetes workers do, it lets the flow end: ranks commit a last checkpoint, and the same flow run is awaited
# elsewhere.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/work \
    PYTHONUNBUFFERED=1 \
    PREFECT_HOME=/work/.prefect \
    PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR=reschedule \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER trainer
WORKDIR /work

# Not -g: the flow's supervisor passes the signal on by itself, once the flow knows what it means. -s: containers of a Docker
# work pool have an init process already.
ENTRYPOINT ["tini", "-s", "--"]
CMD ["prefect", "version"]
