"""Real clusters of this machine: Ray, Dask and Slurm, each stopped by the pids of what was started."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
from agents import WITHOUT_COMPILER
from prefect_servers import wait_until
from process_trees import kill_tree
from servers import free_port

BIN = Path(sys.executable).parent
LOOPBACK = "127.0.0.1"


@contextmanager
def program(log: Path, *command: str, **variables: str) -> Iterator[psutil.Process]:
    """Run a program, which is killed with all its descendants in the end."""
    with log.open("wb") as output:
        started = psutil.Popen(command, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield started
    finally:
        kill_tree(started.pid)
        started.wait(20)


def wait_for_line(log: Path, words: str) -> None:
    wait_until(lambda: words in log.read_text(), log.read_text, 90)


@contextmanager
def ray_cluster(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the address of a cluster of two machines with room for one rank each, and `ray start` of the second one."""
    port = free_port()
    # Short, since Ray's sockets are below it.
    common = [
        "--block",
        "--num-cpus=1",
        "--disable-usage-stats",
        "--include-log-monitor=false",  # nor is the cluster to grow: each is a process that imports Ray
        f"--node-ip-address={LOOPBACK}",
        "--object-store-memory=80000000",
        "--min-worker-port=0",  # else its workers own 10002 to 19999, and the chosen port may be one of them
        "--max-worker-port=0",
    ]
    head = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor", f"--temp-dir={folder}"]
    ray = str(BIN / "ray")
    # With a token in the user's home, `ray start --head` wants it from all, and `ray start --address` does not send it. On a
    # loaded machine the head may take longer than Ray's 5 s to answer.
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_gcs_rpc_server_connect_timeout_s": "60"}
    with program(folder / "head.txt", ray, "start", *head, *common, "--node-name=first", **variables):
        address = f"{LOOPBACK}:{port}"
        wait_for_line(folder / "head.txt", "Ray runtime started")
        join = [ray, "start", f"--address={address}", *common, "--node-name=second"]
        with program(folder / "second.txt", *join, **variables) as second:
            wait_for_line(folder / "second.txt", "Ray runtime started")
            yield address, second


def drain_node_of_ray(address: str, name: str) -> None:
    """Have Ray announce that a machine is going to be taken away, as an autoscaler does before the end of a spot instance."""
    program = (
        "import sys, time, ray\n"
        "from ray.core.generated.autoscaler_pb2 import DrainNodeReason\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "(node,) = [it['NodeID'] for it in ray.nodes() if it['NodeName'] == sys.argv[2]]\n"
        "reason = DrainNodeReason.Value('DRAIN_NODE_REASON_PREEMPTION')\n"
        "client = ray._raylet.GcsClient(address=sys.argv[1])\n"
        "is_accepted, why = client.drain_node(node, reason, 'of a spot instance', int(time.time() + 3600) * 1000)\n"
        "assert is_accepted, why\n"
    )
    variables = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    subprocess.run([sys.executable, "-c", program, address, name], env=variables, check=True)


@contextmanager
def dask_cluster(folder: Path) -> Iterator[tuple[str, Callable[..., list[psutil.Process]]]]:
    """Yield the address of a scheduler, and what starts workers of the given names and returns their nannies."""
    address = f"tcp://{LOOPBACK}:{free_port()}"
    dask = str(BIN / "dask")
    options = ["--no-dashboard", f"--host={LOOPBACK}"]
    # Else each of its processes looks at itself a hundred times in a second, which takes 1 to 2 % of a core.
    quiet = {
        "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "10s",
        "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
        "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    }
    with ExitStack() as stack:
        scheduler = [dask, "scheduler", *options, f"--port={address.rpartition(':')[2]}"]
        stack.enter_context(program(folder / "scheduler.txt", *scheduler, **quiet))

        def start(*names: str) -> list[psutil.Process]:
            command = [dask, "worker", address, *options, "--nthreads=1"]
            logs = {name: folder / f"{name}.txt" for name in names}
            nannies = [
                stack.enter_context(
                    program(log, *command, f"--name={name}", f"--local-directory={folder / name}", **WITHOUT_COMPILER, **quiet)
                )
                for name, log in logs.items()
            ]
            for log in logs.values():
                wait_for_line(log, "Registered to")
            return nannies

        yield address, start


HAS_SLURM = shutil.which("slurmctld") is not None and shutil.which("slurmd") is not None and os.geteuid() == 0


@contextmanager
def slurm_cluster(folder: Path, *names: str) -> Iterator[str]:
    """Yield the configuration file of a cluster of machines with these names, each of which is a slurmd."""
    host = socket.gethostname().partition(".")[0]
    for name in ("state", *(f"spool-{name}" for name in names)):
        (folder / name).mkdir()
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}({LOOPBACK})",
        "SlurmctldPort": free_port(),
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "SelectType": "select/cons_tres",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool-%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
    }
    file = folder / "slurm.conf"
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr={LOOPBACK} Port={free_port()} CPUs=2 State=UNKNOWN" for name in names
    ]
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    file.write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "SLURM_CONF": str(file)}

    def are_idle() -> bool:
        asked = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=environment, capture_output=True, text=True, check=False)
        return asked.stdout.split() == ["idle"] * len(names)

    with ExitStack() as stack:
        stack.enter_context(program(folder / "slurmctld.txt", "slurmctld", "-D", "-f", str(file)))
        for name in names:
            slurmd = ["slurmd", "-D", "-N", name, "-f", str(file)]
            stack.enter_context(program(folder / f"slurmd-{name}.txt", *slurmd, SLURM_CONF=str(file)))
        wait_until(are_idle, lambda: [file.read_text() for file in folder.glob("slurmd-*.txt")], 60)
        yield str(file)


class KubernetesServer:
    """What KubernetesCluster needs of Kubernetes' API, on this machine: it checks manifests, and runs pods as processes."""

    def __init__(self, folder: Path, *, knows_job_sets: bool) -> None:
        self.requests: list[tuple[str, str]] = []
        self.pods: list[psutil.Popen] = []
        self.listed: dict[str, list[dict]] = {"pods": [], "events": []}  # what it answers about them
        self.pending: set[int] = set()  # the numbers of pods that are never started
        self._folder = folder
        self._knows_job_sets = knows_job_sets
        self._made: dict[str, Any] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(server.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(server.post(self.path, body), 201)

            def do_DELETE(self) -> None:
                path = self.path.partition("?")[0]
                server.requests.append(("DELETE", path))
                if "/pods/" in path:
                    self._answer({"kind": "Pod", "metadata": {"name": path.rpartition("/")[2]}})
                else:
                    server.end_pods()
                    self._answer({"kind": "Status", "status": "Success"})

            def _answer(self, content: object, status: int = 200) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.configuration = folder / "kubeconfig"
        self.configuration.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": f"http://{LOOPBACK}:{self._http.server_port}"}}],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
                    "current-context": "x",
                }
            )
        )

    def get(self, path: str) -> dict:
        if path == "/apis/":
            groups = ["batch", *(["jobset.x-k8s.io"] if self._knows_job_sets else [])]
            version = {"groupVersion": "x/v1", "version": "v1"}
            return {"kind": "APIGroupList", "groups": [{"name": name, "versions": [version]} for name in groups]}
        return {"kind": "List", "apiVersion": "v1", "items": self.listed[path.partition("?")[0].rpartition("/")[2]]}

    def post(self, path: str, body: dict) -> dict:
        self.requests.append(("POST", path))
        if body["kind"] == "JobSet":
            job = {"apiVersion": "batch/v1", "kind": "Job", **body["spec"]["replicatedJobs"][0]["template"]}
        else:
            job = body
        kubernetes_validate.validate(job, "1.31", strict=True)
        if body["kind"] == "Secret":
            self._start_pods(body)
        else:
            self._made = job
        return {**body, "metadata": {**body["metadata"], "uid": "5"}}

    def _start_pods(self, secret: dict) -> None:
        spec = self._made["spec"]
        container = spec["template"]["spec"]["containers"][0]
        for index in sorted(set(range(spec["completions"])) - self.pending):
            fields = {  # of the downward API
                "spec.nodeName": f"node-{index}",
                "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            }
            values = {}
            for variable in container["env"]:
                source = variable.get("valueFrom", {})
                if "value" in variable:
                    values[variable["name"]] = variable["value"]
                elif "fieldRef" in source:
                    values[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
                else:
                    assert source["secretKeyRef"]["name"] == secret["metadata"]["name"]
                    values[variable["name"]] = secret["stringData"][source["secretKeyRef"]["key"]]
            arguments = container["args"]
            for name, value in values.items():
                arguments = [argument.replace(f"$({name})", value) for argument in arguments]
            command = [sys.executable, *container["command"][1:], *arguments]
            self.pods.append(psutil.Popen(command, env={**os.environ, **values}, stdin=subprocess.DEVNULL))

    def end_pods(self) -> None:
        for pod in self.pods:
            if pod.is_running():
                pod.terminate()

    def stop(self) -> None:
        for pod in self.pods:
            kill_tree(pod.pid)
            pod.wait(20)
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
