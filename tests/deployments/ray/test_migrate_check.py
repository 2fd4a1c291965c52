"""`prefect-torch migrate-check`: what of Ray a file uses is found, whatever it is called, and what to write for it exists."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import get_args

import pytest
from prefect_torch.ckpt import Checkpoint, CheckpointStore, Manifest, TrainContext
from prefect_torch.deployments.command_line.program import run
from prefect_torch.deployments.command_line.ray.equivalents import (
    ATTRIBUTES,
    ITEMS,
    PARAMETERS,
    RETURNS,
    Equivalents,
    Verdict,
    sections,
)
from prefect_torch.deployments.command_line.ray.usages import find_usages
from prefect_torch.flows import (
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    SearchConfig,
    Trial,
)
from pydantic import ValidationError

ROWS = [row for section in sections() for row in section.rows]
PACKAGES = ("ckpt", "ckpt.lightning", "ckpt.transformers", "flows", "tasks", "deployments")
# What rows call the objects of our classes.
INSTANCES = {
    "checkpoint": Checkpoint,
    "CheckpointStore": CheckpointStore,
    "get_context()": TrainContext,
    "manifest": Manifest,
    "result": Result,
    "store": CheckpointStore,
    "trial": Trial,
    "trial.result": Result,
}


def uses(source):
    """Return the names that a file uses, with their arguments, in its order."""
    return [
        f"{usage.name.removeprefix('ray.')}({usage.keyword}={usage.value})"
        if usage.keyword
        else usage.name.removeprefix("ray.")
        for usage in find_usages(textwrap.dedent(source).encode(), Equivalents())
    ]


@pytest.fixture
def check(tmp_path, capsys):
    """Check a file, and return the exit code, what was printed, and what was said on stderr."""

    def call(content, *options, name="training.py"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).strip().encode())
        code = run(["migrate-check", *options, str(path)])
        return code, *(text.replace(f"{tmp_path}/", "") for text in capsys.readouterr())

    return call


@pytest.mark.parametrize(
    "source",
    [
        "import ray\nray.train.report({})",
        "import ray.train\nray.train.report({})",
        "import ray.train as rt\nrt.report({})",
        "from ray import train\ntrain.report({})",
        "from ray.train import report\nreport({})",
        "from ray.train import report as tell\ntell({})",
        "from ray.train import *\nreport({})",
        "from ray.air import session\nsession.report({})",
        "from ray.train.v2.api.train_fn_utils import report\nreport({})",
        "from ray import tune\ntune.report({})",
        "from ray.tune import *\nreport({})",
        "def train_func():\n    from ray.train import report\n    report({})",
        "def train_func():\n    report({})\nfrom ray.train import report",
        "class Callback:\n    import ray.train as rt\n    rt.report({})",
        "import ray.train\nlambda: ray.train.report({})",
        "import ray.train\n[ray.train.report({}) for _ in ()]",
    ],
)
def test_a_name_is_followed_through_imports(source):
    assert uses(source)[:1] == ["train.report"]


def test_methods_are_found_through_what_calls_return():
    assert uses("""
        from ray.train import get_context, get_checkpoint, get_all_reported_checkpoints
        from ray.train.torch import TorchTrainer
        rank = get_context().get_world_rank()
        context = get_context()
        context.get_world_size()
        if (found := get_checkpoint()) is not None:
            with found.as_directory() as folder:
                folder.upper()
        for reported in get_all_reported_checkpoints():
            reported.metrics["loss"].hex()
            reported.checkpoint.to_directory()
        TorchTrainer(print).fit().best_checkpoints[0][0].path
    """) == [
        *("train.get_context", "train.TrainContext.get_world_rank", "train.get_context", "train.TrainContext.get_world_size"),
        *("train.get_checkpoint", "train.Checkpoint.as_directory", "train.get_all_reported_checkpoints"),
        *("train.ReportedCheckpoint.metrics", "train.ReportedCheckpoint.checkpoint", "train.Checkpoint.to_directory"),
        *("train.torch.TorchTrainer", "train.torch.TorchTrainer(train_loop_per_worker=)", "train.torch.TorchTrainer.fit"),
        *("train.Result.best_checkpoints", "train.Checkpoint.path"),
    ]


def test_annotations_tell_what_is_passed():
    assert uses("""
        import ray.train
        def use(result: ray.train.Result, checkpoint: ray.train.Checkpoint | None = None):
            for best, metrics in result.best_checkpoints:
                best.filesystem, metrics.keys()
            checkpoint.uri
    """) == [
        *("train.Result", "train.Checkpoint", "train.Result.best_checkpoints", "train.Checkpoint.filesystem"),
        "train.Checkpoint.uri",
    ]


def test_what_the_files_own_functions_return_is_known_by_their_annotations():
    assert uses("""
        from ray import tune
        from ray.train import Result
        def search() -> tune.ResultGrid:
            return tune.Tuner(print).fit()
        def trained() -> Result | None: ...
        async def later() -> Result: ...
        search().get_best_result().config
        later().path, trained.path
        if found := trained():
            found.metrics_dataframe
    """) == [
        *("tune.ResultGrid", "tune.Tuner", "tune.Tuner(trainable=)", "tune.Tuner.fit", "train.Result", "train.Result"),
        *("tune.ResultGrid.get_best_result", "tune.Result.config", "train.Result.metrics_dataframe"),
    ]


def test_arguments_are_found_by_name_and_by_place():
    found = uses("""
        from ray.train import *
        report({}, None, "name", checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        ScalingConfig(num_workers=(2, 8), use_gpu=True)
    """)
    assert uses("from ray.tune import TuneConfig\nTuneConfig('max', 'loss')")[1:] == [
        *("tune.TuneConfig(mode='max')", "tune.TuneConfig(metric='loss')"),
    ]
    assert found == [
        *(
            "train.report",
            "train.report(metrics=)",
            "train.report(checkpoint=None)",
            "train.report(checkpoint_dir_name='name')",
        ),
        *("train.report(checkpoint_upload_mode=)", "train.CheckpointUploadMode.ASYNC", "train.ScalingConfig"),
        *("train.ScalingConfig(num_workers=(…))", "train.ScalingConfig(use_gpu=True)"),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "report({})",
        "from elsewhere import report\nreport({})",
        "from ray.train import report\ndef report(metrics): ...\nreport({})",
        "import ray.train\ndef use(ray): ray.train.report({})",
        "import rayon as ray\nray.train.report({})",
        "'import ray.train; ray.train.report({})'",
        "# ray.train.report({})",
    ],
)
def test_what_is_not_rays_is_not_listed(source):
    assert [name for name in uses(source) if "report" in name][1:] == []


def test_a_name_is_known_from_the_module_that_defines_it():
    assert uses("""
        from ray.train.torch.config import TorchConfig
        from ray.train.base_trainer import TrainingFailedError
        from ray.train.context import TrainContext
    """) == ["train.torch.TorchConfig", "train.TrainingFailedError", "train.TrainContext"]


def test_what_tune_has_of_a_trainings_is_listed_as_that_and_the_rest_for_itself():
    assert uses("""
        from ray import tune
        tune.get_context().get_trial_id()
        results = tune.Tuner(print, run_config=tune.RunConfig(stop=stop)).fit()
        results.get_best_result("loss", "min").checkpoint.to_directory()
    """) == [
        *("train.get_context", "train.TrainContext.get_trial_id", "tune.Tuner", "tune.Tuner(trainable=)"),
        *("tune.Tuner(run_config=)", "train.RunConfig"),
        *("train.RunConfig(stop=)", "tune.Tuner.fit", "tune.ResultGrid.get_best_result"),
        *("tune.ResultGrid.get_best_result(metric='loss')", "tune.ResultGrid.get_best_result(mode='min')"),
        *("tune.Result.checkpoint", "train.Checkpoint.to_directory"),
    ]


def test_the_items_of_a_result_grid_are_results_of_trials():
    assert uses("""
        from ray.tune import Tuner
        results = Tuner(print).fit()
        for result in results:
            result.config, result.metrics["loss"]
        [it.error for it in results]
        results[0].best_checkpoints[0][0].path
    """)[3:] == [
        *("tune.Result.config", "tune.Result.metrics", "tune.Result.error"),
        *("tune.Result.best_checkpoints", "train.Checkpoint.path"),
    ]


def test_names_are_followed_through_what_python_itself_does_with_items():
    assert uses("""
        from ray.tune import Tuner
        from ray.train import Result
        results = Tuner(print).fit()
        for i, result in enumerate(results):
            result.error, i.error
        for result in sorted(results, key=len):
            result.config
        min(results, key=len).checkpoint.path
        [it.metrics for _, it in enumerate(list(results))]
        def use(result: Result):
            min(result.best_checkpoints, key=len)[0].filesystem
            for i, (checkpoint, metrics) in enumerate(result.best_checkpoints, 1):
                checkpoint.uri, metrics.uri
        def other(results, enumerate, min):
            for i, result in enumerate(results):
                min(results).error, result.error
    """)[3:] == [
        *("tune.Result.error", "tune.Result.config", "tune.Result.checkpoint", "train.Checkpoint.path", "tune.Result.metrics"),
        *("train.Result", "train.Result.best_checkpoints", "train.Checkpoint.filesystem"),
        *("train.Result.best_checkpoints", "train.Checkpoint.uri"),
    ]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("train._checkpoint.Checkpoint", "train.Checkpoint"),
        ("train.backend.BackendConfig", "train.BackendConfig"),
        ("train.collective.collectives.barrier", "train.collective.barrier"),
        (
            "train.huggingface.transformers._transformers_utils.prepare_trainer",
            "train.huggingface.transformers.prepare_trainer",
        ),
        ("train.lightning._lightning_utils.RayDDPStrategy", "train.lightning.RayDDPStrategy"),
        ("train.torch.torch_checkpoint.TorchCheckpoint", "train.torch.TorchCheckpoint"),
        ("tune.context.TuneContext", "tune.TuneContext"),
        ("tune.context.get_context", "train.get_context"),
        ("tune.experiment.experiment.Experiment", "tune.Experiment"),
        ("tune.logger.csv.CSVLoggerCallback", "tune.logger.CSVLoggerCallback"),
        ("tune.schedulers.create_scheduler", "tune.create_scheduler"),
        ("tune.schedulers.PB2", "tune.schedulers.PB2"),
        ("tune.schedulers.pb2.PB2", "tune.schedulers.PB2"),
        ("tune.search.sample.qrandint", "tune.qrandint"),
        ("tune.search.variant_generator.grid_search", "tune.grid_search"),
        ("tune.stopper.maximum_iteration.MaximumIterationStopper", "tune.stopper.MaximumIterationStopper"),
        ("tune.stopper.stopper.Stopper", "tune.Stopper"),
        ("tune.trainable.trainable_fn_utils.report", "train.report"),
        ("tune.trainable.util.with_resources", "tune.with_resources"),
        ("tune.suggest.ConcurrencyLimiter", "tune.search.ConcurrencyLimiter"),
        ("tune.suggest.optuna.OptunaSearch", "tune.search.optuna.OptunaSearch"),
        ("tune.tune.run_experiments", "tune.run_experiments"),
    ],
)
def test_a_name_is_known_by_the_module_that_defines_it(name, short):
    module, _, last = name.rpartition(".")
    assert uses(f"from ray.{module} import {last}") == [short]


def test_the_arguments_of_tunes_classes_and_of_a_results_methods_are_told_one_by_one(check):
    code, out, _ = check("""
        from ray.tune.schedulers.pbt import PopulationBasedTraining
        from ray.tune.tuner import Tuner
        PopulationBasedTraining("step", perturbation_interval=2, quantile_fraction=0.5, hyperparam_mutations={})
        Tuner.restore("s3://bucket/sweep", print, restart_errored=True).fit().get_dataframe(filter_metric="loss")
    """)
    found = re.findall(r"ray\.tune\.\S*?(\w+)\((\w+)=\) +(\w+)", out)
    assert code == 1
    assert found == [
        ("PopulationBasedTraining", "quantile_fraction", "missing"),
        ("PopulationBasedTraining", "hyperparam_mutations", "different"),
        ("restore", "path", "different"),
        ("restore", "trainable", "same"),
        ("restore", "restart_errored", "different"),
        ("get_dataframe", "filter_metric", "missing"),
    ]


def test_the_trials_of_an_analysis_are_told_by_what_is_read_of_them():
    assert uses("""
        from ray import tune
        found = tune.run(print)
        print(found.get_best_trial("loss", "min", "last").last_result, [trial.status for trial in found.trials])
    """)[2:] == [
        "tune.ExperimentAnalysis.get_best_trial",
        *(f"tune.ExperimentAnalysis.get_best_trial({it})" for it in ("metric='loss'", "mode='min'", "scope='last'")),
        "tune.Trial.last_result",
        "tune.Trial.status",
        "tune.ExperimentAnalysis.trials",
    ]


def test_the_arguments_of_an_analysis_methods_are_told_one_by_one(check):
    code, out, _ = check("""
        from ray import tune
        found = tune.run(print, resume="AUTO")
        found.dataframe("loss", mode="min")
        found.best_checkpoint.to_directory()
        found.get_best_checkpoint(found.best_trial, metric="loss").path
        found.get_last_checkpoint(metric="loss").path
    """)
    names = re.findall(r"ray\.(?:tune\.ExperimentAnalysis|train\.Checkpoint)\.(\S+) +(\w+)", out)
    assert code == 1
    assert names == [
        *(("dataframe", "same"), ("dataframe(metric=)", "missing"), ("dataframe(mode=)", "missing")),
        *(("best_checkpoint", "different"), ("to_directory", "better")),
        *(("get_best_checkpoint", "different"), ("best_trial", "different"), ("get_best_checkpoint(trial=)", "different")),
        *(("get_best_checkpoint(metric=)", "same"), ("path", "different")),
        *(("get_last_checkpoint", "different"), ("get_last_checkpoint(metric=)", "different"), ("path", "different")),
    ]


@pytest.mark.parametrize(
    ("given", "verdict"), [("use_gpu=True", "different"), ("use_gpu=has_gpus", "different"), ("use_gpu=False", "same")]
)
def test_the_shorter_limit_of_nccl_is_told_where_ranks_may_have_gpus(check, given, verdict):
    _, out, _ = check(f"from ray.train import ScalingConfig\nScalingConfig({given})", "--json")
    _, told = json.loads(out)
    assert (told["verdict"], "timeout_s=1800" in told["note"]) == (verdict, verdict == "different")


def test_the_arguments_of_tunes_callbacks_for_lightning_are_told_one_by_one():
    assert uses("""
        from ray.tune.integration.pytorch_lightning import TuneReportCallback, TuneReportCheckpointCallback
        TuneReportCheckpointCallback({"loss": "ptl/val_loss"}, "checkpoint", False, on="validation_end")
        TuneReportCallback(metrics=["loss"])
    """) == [
        "tune.integration.pytorch_lightning.TuneReportCheckpointCallback",
        *(
            f"tune.integration.pytorch_lightning.TuneReportCheckpointCallback({it})"
            for it in ("metrics=", "filename='checkpoint'", "save_checkpoints=False", "on='validation_end'")
        ),
        "tune.integration.pytorch_lightning.TuneReportCallback",
        "tune.integration.pytorch_lightning.TuneReportCallback(metrics=)",
    ]


def test_the_schedulers_and_domains_of_tune_are_known_wherever_they_are_defined():
    known = Equivalents()
    assert known.has("ray.tune.schedulers.PB2")
    assert known.of("ray.tune.search.sample.Float").note.startswith("leave it out: a domain is a dict")


def test_an_import_that_nothing_uses_is_listed_for_itself():
    assert uses("import ray.train\nfrom ray.train import SyncConfig") == ["train.SyncConfig"]


def test_a_file_is_told_line_by_line_and_ends_with_its_imports(check):
    code, out, err = check("""
        import ray.train

        def train_func(config):
            print("é", ray.train.get_context().get_world_rank())
            ray.train.report({}, checkpoint_upload_fn=print)
    """)
    lines = [line.split() for line in out.splitlines()]
    assert [line[:3] for line in lines[1:5]] == [
        ["training.py:4:16", "ray.train.get_context", "same"],
        ["training.py:4:40", "ray.train.TrainContext.get_world_rank", "same"],
        ["training.py:5:5", "ray.train.report", "better"],
        ["training.py:5:26", "ray.train.report(checkpoint_upload_fn=)", "missing"],
    ]
    assert out.splitlines()[-2:] == [
        "4 uses: 2 same, 1 better, 1 missing",
        "from prefect_torch.ckpt import get_context, report",
    ]
    assert (code, err) == (1, "")


def test_a_file_with_an_equivalent_for_everything_exits_with_0(check):
    assert check("import ray.train\nray.train.report({})")[0] == 0
    assert check("print('hello')") == (0, "no name of Ray is used\n", "")


def test_json_has_the_keys_that_the_help_names(check):
    code, out, _ = check("import ray.train\nray.train.report({}, validation=True)\nray.tune.randn()", "--json")
    reported, validated, tuned = json.loads(out)
    assert code == 1
    assert reported | {"note": ""} == {
        "file": "training.py",
        "line": 2,
        "column": 1,
        "ray": "ray.train.report",
        "verdict": "better",
        "here": "report(metrics, checkpoint=)",
        "note": "",
        "imports": ["prefect_torch.ckpt.report"],
    }
    assert (validated["ray"], validated["verdict"], validated["column"]) == ("ray.train.report(validation=)", "different", 22)
    assert (tuned["ray"], tuned["verdict"], tuned["here"]) == ("ray.tune.randn", "missing", "")


def test_a_file_is_read_and_never_run(check, tmp_path):
    assert check(f"open({str(tmp_path / 'written')!r}, 'w')\nimport nothing_of_that_name")[0] == 0
    assert not (tmp_path / "written").exists()


def test_neither_prefect_nor_torch_is_waited_for(tmp_path):
    (tmp_path / "training.py").write_text("import ray.train\nray.train.report({})")
    program = f"""
import sys
from prefect_torch.deployments.command_line.program import run
assert run(["migrate-check", {str(tmp_path / "training.py")!r}]) == 0
assert not {{"prefect", "torch", "ray"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_a_name_that_no_table_has_is_missing(check):
    code, out, _ = check("import ray.train\nray.train.new()\nray.train.report({}, newer=1)")
    assert code == 1
    assert re.findall(r"ray\.train\.(\S+) +missing", out) == ["new", "report(newer=)"]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8-sig"])
def test_an_encoding_that_the_file_names_counts(check, encoding):
    cookie = "# -*- coding: latin-1 -*-\n" if encoding == "latin-1" else "\n"
    code, out, _ = check(f"{cookie}import ray.train\n'é', ray.train.report({{}})".encode(encoding))
    assert (code, out.splitlines()[1].split()[0]) == (0, "training.py:3:6")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.py", b"def f(:\n", "a.py:1 is not valid Python for this interpreter: invalid syntax"),
        ("a.py", b"x = 1\ny = '\xe9'\n", "a.py is not text in utf-8, as Python expects"),
        ("a.py", b"# coding: nothing\n", "a.py is not valid Python for this interpreter: unknown encoding: nothing"),
        ("a.py", b"x\0", "a.py is not valid Python"),
        ("a.py", b"(" * 100_000, "a.py"),
        ("a.py", b"x = 0" + b" + 1" * 3000, "a.py is nested too deeply to be analyzed"),
        ("a.ipynb", b"{}", "a.ipynb is a notebook: give the output of 'jupyter nbconvert --to script"),
    ],
)
def test_what_is_no_python_is_told_in_one_line(check, name, content, message):
    code, out, err = check(content, name=name)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_folder_and_nothing_are_no_files(tmp_path, capsys):
    for path, message in [(tmp_path, "is a directory: give the Python files"), (tmp_path / "none.py", "there is no file")]:
        assert run(["migrate-check", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert run(["migrate-check"]) == 2
    assert (run(["migrate-check", ""]), "FILE is empty: give a Python file" in capsys.readouterr().err) == (2, True)


def test_what_stands_here_exists():
    for row in ROWS:
        assert (row.verdict == "missing") <= (row.here == ""), row
        assert row.verdict in get_args(Verdict), row
        for name in row.imports:
            package, _, attribute = name.rpartition(".")
            assert not package or hasattr(importlib.import_module(package), attribute), name
        for code in re.findall(r"`([^`]+)`", f"{row.here} {row.note}"):
            _check_exists(code)


def _check_exists(code):
    """Refuse names and arguments of ours that do not exist, as far as a row tells whose they are."""
    try:
        node = ast.parse(code.replace("…", "*_"), mode="eval").body
    except SyntaxError:
        try:
            node = ast.parse(re.sub(r"=(?=[,)])", "=0", code.replace("(…, ", "(*_, ").replace("…", "_")), mode="eval").body
        except SyntaxError:  # `with … as`, `upload="async"`
            return
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and (owner := INSTANCES.get(ast.unparse(part.value))) is not None:
            known = {*dir(owner), *inspect.get_annotations(owner), "ckpt"}  # checkpoint.ckpt is a file
            assert part.attr in known, code
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and (function := _public(part.func.id)) is not None:
            known = getattr(function, "model_fields", None) or inspect.signature(getattr(function, "fn", function)).parameters
            assert {keyword.arg for keyword in part.keywords} <= set(known), code


def _public(name):
    for package in PACKAGES:
        module = importlib.import_module(f"prefect_torch.{package}")
        if name in getattr(module, "__all__", ()):
            return getattr(module, name)
    return None


@pytest.mark.parametrize("row", [row for row in ROWS if row.verdict == "refused" and "(" in row.ray], ids=lambda row: row.ray)
def test_what_is_refused_is_an_error_where_it_is_given(row):
    config, argument = re.fullmatch(r"ray\.train\.(\w+)\((\w+)=0?\)", row.ray).groups()
    with pytest.raises(ValueError, match=argument):
        {"RunConfig": RunConfig, "ScalingConfig": ScalingConfig}[config](**{argument: 0})


def test_fields_of_rays_configs_are_refused_with_what_to_write():
    for ray, config in {
        "ray.train.ScalingConfig": ScalingConfig,
        "ray.train.RunConfig": RunConfig,
        "ray.train.CheckpointConfig": CheckpointConfig,
        "ray.train.FailureConfig": FailureConfig,
        "ray.tune.TuneConfig": SearchConfig,
    }.items():
        given = dict.fromkeys(set(PARAMETERS[ray]) - config.model_fields.keys(), 1)
        with pytest.raises(ValidationError) as caught:
            config(**given)
        refused = [error for error in caught.value.errors() if error["type"] == "extra_forbidden"]
        assert len(refused) == len(given)
        assert not [error["msg"] for error in refused if "; there are " in error["msg"]]


@pytest.mark.parametrize("name", ["resources_per_worker", "placement_strategy", "accelerator_type"])
def test_what_a_ray_cluster_has_is_told_to_those_who_keep_theirs(name):
    assert "RayCluster(" in Equivalents().of_argument("ray.train.ScalingConfig", name, "").here
    with pytest.raises(ValidationError, match=r"give cluster=RayCluster\("):
        ScalingConfig(**{name: "SPREAD"})


def test_no_name_has_two_rows():
    names = [row.ray for row in ROWS if row.ray]
    assert len(names) == len(set(names))


def test_what_is_known_of_rays_calls_is_about_names_with_rows():
    rows = Equivalents()
    for name in [*PARAMETERS, *RETURNS, *ATTRIBUTES, *ITEMS]:
        assert rows.has(name), name
    for argument in [row.ray for row in ROWS if "(" in row.ray]:
        name, _, keyword = argument.partition("(")
        assert keyword.partition("=")[0] in PARAMETERS[name], argument


def test_an_argument_without_a_row_has_the_same_name_here():
    rows = Equivalents()
    for name, parameters in PARAMETERS.items():
        for keyword in parameters:
            if rows.of_argument(name, keyword, "") is None:
                ours = re.match(r"`(?:\w+\.)?(\w+)\(", rows.of(name).here)[1]
                function = _public(ours) or getattr(Result, ours)
                known = getattr(function, "model_fields", None) or inspect.signature(function).parameters
                assert keyword in known or name == "ray.train.Result.from_path", f"{name}({keyword}=)"


def test_ports_of_rays_examples_use_nothing_of_ray(check):
    for path in (Path(__file__).parents[3] / "examples").rglob("*.py"):
        assert check(path.read_bytes())[1] == "no name of Ray is used\n", path
