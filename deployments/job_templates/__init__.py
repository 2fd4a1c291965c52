"""Base job templates for work pools with GPUs: Prefect's own, with additional variables.

- process: `visible_gpus`, as CUDA_VISIBLE_DEVICES; memory and /dev/shm are the machine's. A cancelled flow run has 30 seconds.
- docker: `num_gpus` or `gpu_ids`, `shared_memory`, and an init process that forwards signals; the machine needs NVIDIA's
  container toolkit. Docker gives each container the first `num_gpus` of the machine: for concurrent flow runs, give all of them
  (-1) and `ipc_mode="host"`, so that trainings see each other's locks, or work pools with different `gpu_ids`. A template with
  `num_gpus=0` requests no driver; for AMD's GPUs, also give `devices=["/dev/kfd", "/dev/dri"]`.
  `container_create_kwargs` cannot be merged, so the parts that trainings need are separate variables: `ipc_mode`, `ulimits`,
  `devices`, `cap_add`, ….
- kubernetes: `num_gpus`, `shared_memory`, `termination_grace_s`, `node_selector`, `tolerations`; the cluster needs NVIDIA's
  device plugin.

Containers run `prefect-torch execute`, which leaves a flow the container's whole grace period for a last checkpoint. One
that is cancelled in Prefect has 300 s, a setting of Prefect's server; then its worker ends the container.

From a terminal: `prefect work-pool create gpu-pool --type kubernetes --base-job-template FILE`, with a file of this directory.
"""
