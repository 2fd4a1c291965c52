"""Tests in processes that have the simulated GPU, which cannot be unregistered, each forked from one that has imported torch.

A mutant is the product with one line changed; a test that is run on it must fail.
"""

import atexit
import faulthandler
import functools
import importlib.machinery
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from forked_programs import Popen


@dataclass(frozen=True)
class Mutant:
    """One change of the product.

    Attributes:
        module: The name of the changed module below `prefect_torch`.
        old: The text that occurs once in it.
        new: What stands there instead.

    """

    module: str
    old: str
    new: str


def on_simulated_gpu(test):
    """Run a test in a process of its own, in which `simulated_gpu.DEVICE` is registered; its arguments must survive JSON."""

    @functools.wraps(test)
    def run(**arguments):
        failure = failure_of(run, arguments)
        assert not failure, failure

    return run


def failure_of(test, arguments, mutant=None):
    """Return the traceback with which a test ends, empty if it passes."""
    request = {
        "path": inspect.getsourcefile(test.__wrapped__),
        "name": test.__name__,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        "mutant": None if mutant is None else asdict(mutant),
    }
    server = _server(has_product=mutant is None)
    print(json.dumps(request), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


@functools.cache
def _server(*, has_product):
    server = Popen(
        [sys.executable, __file__, *["with-product"] * has_product], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(lambda: server.communicate(timeout=10))
    return server


def serve():
    import pytest  # noqa: F401, PLC0415 - before the forks, for all of them
    import simulated_gpu  # noqa: PLC0415 - with torch, in this process only
    import torch._dynamo  # noqa: F401, PLC0415 - a second of the first optimizer's step

    simulated_gpu.register()
    if sys.argv[1:]:
        import prefect_torch.ckpt.state.loading.load  # noqa: F401, PLC0415 - as above
        import ranks  # noqa: F401, PLC0415 - as above
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "prefect_torch"]:
            del sys.modules[name]  # mutants are imported in each process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print
    for line in sys.stdin:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            with os.fdopen(writing, "w") as told:
                told.write(_run(**json.loads(line)))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            failure = told.read()
        _, status = os.waitpid(process, 0)
        print(json.dumps(failure or (f"ended with {status}" if status else "")), file=answers, flush=True)


def _run(path, name, arguments, mutant):
    import torch  # noqa: PLC0415 - is there already

    torch.set_num_threads(1)  # in a fork it replaces torch's pool of threads, which fails where two threads begin at once
    faulthandler.dump_traceback_later(60, exit=True)
    warnings.simplefilter("error")
    if mutant is not None:
        sys.meta_path.insert(0, _MutantFinder(Mutant(**mutant)))
    try:
        spec = importlib.util.spec_from_file_location("tested", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        given = {key: Path(value) if key == "tmp_path" else value for key, value in arguments.items()}
        getattr(module, name).__wrapped__(**given)
    except BaseException:  # noqa: BLE001 - told to the process that asked
        return traceback.format_exc()
    return ""


class _MutantFinder:
    def __init__(self, mutant):
        self._mutant = mutant

    def find_spec(self, name, path, target=None):
        if name != f"prefect_torch.{self._mutant.module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        spec.loader = _MutantLoader(spec.loader.name, spec.loader.path)
        spec.loader.mutant = self._mutant
        return spec


class _MutantLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_source(fullname)
        if source.count(self.mutant.old) != 1:
            raise LookupError(f"{self.mutant.old!r} does not occur once in {fullname}")
        return compile(source.replace(self.mutant.old, self.mutant.new), self.path, "exec")


if __name__ == "__main__":
    serve()
