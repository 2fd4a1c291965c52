"""Programs that use the installed package: they import all of it, and train."""

# Modules whose frameworks are extras.
INTEGRATIONS = ("prefect_torch.ckpt.accelerate", "prefect_torch.ckpt.lightning", "prefect_torch.ckpt.transformers")
# Prints the version, the number of modules, and the modules of Prefect's server, of which there should be none.
IMPORT_EVERYTHING = f"""
import importlib, pkgutil, sys
import prefect_torch
names = [module.name for module in pkgutil.walk_packages(prefect_torch.__path__, "prefect_torch.")]
for name in names:
    if not name.startswith({INTEGRATIONS!r}):
        importlib.import_module(name)
from importlib.metadata import distribution
for entry_point in distribution("prefect-torch").entry_points:
    entry_point.load()
print(prefect_torch.__version__, len(names), *[name for name in sys.modules if name.startswith("prefect.server")])
"""
# To be my_training.py, beside the program that trains with it.
TRAINING = """
from prefect_torch.ckpt import report


def train_fn(config):
    for step in range(3):
        report({"step": step}, state={"step": step})
    return "trained"
"""
TRAIN = """
from prefect_torch.flows import RunConfig, ScalingConfig, train

if __name__ == "__main__":
    print(train("my_training:train_fn", scaling=ScalingConfig(num_workers=2), run=RunConfig(name="run")).return_value)
"""
# Its last line where Prefect's server does not run.
REFUSED = (
    r"ImportError: the server of prefect \S+, which a flow starts unless PREFECT_API_URL names another, does not run with "
    r"fastapi \S+ and sqlalchemy \S+ \(.+\): pip install 'fastapi<0.151' 'sqlalchemy<2.1', or set PREFECT_API_URL"
)
