"""The Run form in the Prefect UI: what it shows of each parameter, and what it and the flows refuse."""

import asyncio
import re
import uuid

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import ParameterTypeError, PrefectHTTPStatusError
from prefect.filesystems import LocalFileSystem
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate
from prefect_aws.credentials import AwsCredentials
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_torch.ckpt.runs.layout import check_run_name
from prefect_torch.deployments.resuming import resume
from prefect_torch.flows import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    SearchConfig,
    evaluate,
    prune,
    sweep,
    train,
)
from prefect_torch.tasks.options.sync import SyncConfig
from pydantic import ValidationError

TRAIN = parameter_schema(train).model_dump()
PRUNE = parameter_schema(prune).model_dump()
GROUPS = {"scaling": ScalingConfig, "run": RunConfig, "checkpoint": CheckpointConfig, "failure": FailureConfig}
FIELDS = {
    **{name: field for schema in (PRUNE, TRAIN) for name, field in schema["properties"].items()},
    **{
        f"{group}.{name}": field
        for group, model in GROUPS.items()
        for name, field in TRAIN["definitions"][model.__name__]["properties"].items()
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_title_and_sentences_about_it(name):
    field = FIELDS[name]
    assert field["title"][0].isupper()
    assert "_" not in field["title"]
    assert field["description"].endswith(".")


@pytest.mark.parametrize("name", TRAIN["properties"])
def test_every_parameter_of_a_training_shows_its_input_instead_of_a_choice_with_null(name):
    assert "anyOf" not in TRAIN["properties"][name]


def test_the_settings_are_groups_of_the_form():
    shown = {name: field.get("$ref", "").rpartition("/")[2] for name, field in TRAIN["properties"].items()}
    assert {name: model for name, model in shown.items() if model} == {key: it.__name__ for key, it in GROUPS.items()}


@pytest.mark.parametrize("name", [name for name in FIELDS if "." in name])
def test_every_setting_shows_its_input_and_its_default(name):
    group, _, setting = name.partition(".")
    field = FIELDS[name]
    default = GROUPS[group].model_fields[setting].default
    assert field.get("default") == default
    assert ("default" in field) == (default is not None)  # a default of null would be sent, and refused
    assert {"type": "null"} not in field.get("anyOf", [])


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("scaling.backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl", "mpi", "ucc", "xccl"]),
        ("run.resume", ["auto", "never", "must"]),
        ("run.verify", ["digest", "size", "none"]),
        ("checkpoint.checkpoint_score_order", ["max", "min"]),
    ],
)
def test_a_choice_is_a_list_to_choose_from(name, choices):
    assert FIELDS[name]["enum"] == choices


@pytest.mark.parametrize("schema", [TRAIN["definitions"]["RunConfig"], PRUNE], ids=["train", "prune"])
def test_the_storage_can_be_written_or_picked_among_saved_blocks(schema):
    text, *blocks = schema["properties"]["storage"]["anyOf"]
    assert (text["type"], text["title"]) == ("string", "Path or URL")
    slugs = [TRAIN["definitions"][block["$ref"].rpartition("/")[2]]["block_type_slug"] for block in blocks]
    assert slugs == ["checkpoint-storage", "local-file-system", "remote-file-system", "s3-bucket"]


@pytest.mark.parametrize("name", ["digits", "a.b_c-1", "1", "x" * 200, "", "../x", "-x", ".x", "a b", "x" * 201, "ä", "x\n"])
def test_the_form_takes_the_run_names_that_a_training_takes(name):
    try:
        check_run_name(name)
    except ValueError:
        is_good = False
    else:
        is_good = True
    # As in the JSON schema of browsers, where $ is the very end.
    pattern = FIELDS["run.name"]["pattern"].replace("$", r"\Z")
    assert (re.search(pattern, name) is not None) == is_good


@pytest.fixture(scope="module")
def start():
    """Deploy `train` as it is in prefect.yaml, and give what starts a run of it as the form does."""
    name = f"form-{uuid.uuid4().hex[:8]}"
    deployment_id = train.to_deployment(name, enforce_parameter_schema=True).apply()

    def start(**parameters):
        async def create():
            async with get_client() as client:
                return await client.create_flow_run_from_deployment(deployment_id, parameters=parameters)

        return asyncio.run(create())

    return start


FN = {"train_fn": "trainings:train_epochs"}
WRONG = [
    ({}, "'train_fn' is a required property", "missing a required argument: 'train_fn'"),
    ({"train_fn": "trainings"}, "'trainings' does not match", "give 'module:function' or 'path/to/file.py:function'"),
    ({"train_fn": 5}, "5 is not of type 'string'", "train_fn.str: Input should be a valid string"),
    ({**FN, "config": "epochs"}, "'epochs' is not of type 'object'", "config: Input should be a valid dictionary"),
    ({**FN, "scaling": {"num_workers": 0}}, "0 is less than the minimum of 1", "scaling.num_workers: Input should be greater"),
    (
        {**FN, "scaling": {"num_workers": "two"}},
        "'two' is not valid under any",
        "scaling.num_workers: Input should be a valid",
    ),
    ({**FN, "scaling": {"backend": "tcp"}}, "'tcp' is not one of", "scaling.backend: Input should be 'gloo', 'nccl'"),
    ({**FN, "scaling": {"nodes": 2}}, "'nodes' was unexpected", "scaling.nodes: Extra inputs are not permitted; there are num"),
    (
        {**FN, "run": {"storage_path": "x"}},
        "was unexpected",
        "run.storage_path: Extra inputs are not permitted; is 'storage' me",
    ),
    ({**FN, "run": {"name": "../x"}}, "'../x' does not match", "run.name: run name '../x': use 1 to 200 letters"),
    ({**FN, "run": {"storage": 5}}, "5 is not valid under any", "checkpoints cannot be stored with a int: give a path"),
    ({**FN, "run": {"storage": ""}}, "'' is not valid under any", "storage is empty: give a path, a URL"),
    ({**FN, "run": {"resume": "yes"}}, "'yes' is not one of", "run.resume: Input should be 'auto', 'never' or 'must'"),
    ({**FN, "checkpoint": {"num_to_keep": 0}}, "0 is less than the minimum", "checkpoint.num_to_keep: Input should be greater"),
    ({**FN, "checkpoint": {"target_overhead": 2}}, "maximum of 1", "checkpoint.target_overhead: Input should be less than 1"),
    ({**FN, "failure": {"max_failures": -2}}, "-2 is less than the minimum", "failure.max_failures: Input should be greater"),
    ({**FN, "failure": {"retry_delay_s": [-1]}}, "-1 is less than the minimum", "failure.retry_delay_s.0: Input should be gr"),
    ({**FN, "resume_from": 3}, "3 is not of type 'string'", "resume_from.is-instance[Path]: Input should be an inst"),
]


@pytest.mark.parametrize(("parameters", "by_the_form", "_"), WRONG, ids=range(len(WRONG)))
def test_wrong_values_are_refused_by_the_form(start, parameters, by_the_form, _):
    with pytest.raises(PrefectHTTPStatusError) as caught:
        start(**parameters)
    assert caught.value.response.status_code == 409
    assert by_the_form in caught.value.response.json()["detail"]


@pytest.mark.parametrize(("parameters", "_", "by_the_flow"), WRONG, ids=range(len(WRONG)))
def test_wrong_values_are_refused_by_the_flow_in_words(parameters, _, by_the_flow):
    with pytest.raises((ParameterTypeError, ValueError, TypeError)) as caught:
        train(**parameters)
    assert by_the_flow in str(caught.value)


def untouched(model):
    """What both UIs send of a group: the defaults of all inputs that are not empty, also of the groups in it."""
    sent = {}
    for name, field in TRAIN["definitions"][model]["properties"].items():
        if "$ref" in field:
            sent[name] = untouched(field["$ref"].rpartition("/")[2])
        elif "default" in field:
            sent[name] = field["default"]
    return sent


def test_an_untouched_form_is_taken(start):
    groups = {group: untouched(model.__name__) for group, model in GROUPS.items()}
    assert start(**FN, **groups, config={}, resume_from="").parameters["run"]["storage"] == "./checkpoints"


def test_a_group_that_demands_inputs_is_none_until_it_is_chosen(start):
    none, group = FIELDS["run.sync"]["anyOf"]
    assert (none["type"], group["$ref"]) == ("null", "#/definitions/SyncConfig")
    copy = "rsync -a {source} {target}"
    start(**FN, run={"sync": {"upload": copy, "download": copy, "target": "me@host:/there"}})
    start(**FN, run={"sync": None})
    with pytest.raises(PrefectHTTPStatusError):
        start(**FN, run={"sync": {"upload": copy}})


def test_a_deployments_settings_are_taken_by_the_form(start):
    """Also those without a value, which a form shows as empty."""
    assert ScalingConfig().model_dump(mode="json") == {"num_workers": 1, "use_gpu": False}
    start(**FN, **{group: model().model_dump(mode="json") for group, model in GROUPS.items()})
    start(**FN, run={"name": None, "storage_deadline_s": None}, checkpoint={"num_to_keep": None})


def test_a_picked_block_is_taken(start, tmp_path):
    name = f"form-{uuid.uuid4().hex[:8]}"
    block_id = CheckpointStorage(location=str(tmp_path)).save(name)
    start(**FN, run={"storage": {"$ref": {"block_document_id": str(block_id)}}})


@pytest.mark.parametrize("storage", [{"foo": 1}, AwsCredentials(), "http://there/bucket", "s3:/bucket/lost-slash", None, b"x"])
def test_what_can_be_no_storage_is_told_at_once(storage):
    with pytest.raises(ValidationError, match=r"checkpoints cannot be stored with|cannot be written to|lost a slash"):
        RunConfig(storage=storage)


def test_a_storage_stays_as_it_was_given(tmp_path):
    block = LocalFileSystem(basepath=str(tmp_path))
    assert RunConfig(storage=block).storage is block
    assert RunConfig(storage="checkpoint-storage/NAME").storage == "checkpoint-storage/NAME"
    assert RunConfig(storage="./here").storage == "./here"
    assert RunConfig(storage=tmp_path).storage == str(tmp_path)


def test_a_field_left_empty_begins_from_nothing():
    """The form sends an empty text where None is meant."""
    assert train.validate_parameters({**FN, "resume_from": ""})["resume_from"] is None
    empty = dict.fromkeys(("name", "working_dir", "log_level"), "")
    given = {"run": empty, "checkpoint": {"checkpoint_score_attribute": "", "num_to_keep": 2}, "scaling": {"cluster": ""}}
    parameters = train.validate_parameters({**FN, **given})
    assert parameters["run"] == RunConfig()
    assert parameters["checkpoint"] == CheckpointConfig(num_to_keep=2)
    assert parameters["scaling"] == ScalingConfig()
    assert SearchConfig(metric="loss", sampler="", pruner="") == SearchConfig(metric="loss")
    with pytest.raises(ValueError, match="storage"):
        RunConfig(storage="")


CLUSTERS = (
    {"hosts": ["gpu1", "gpu2"], "ranks_per_host": 2, "python": None},
    {"kind": "ray", "resources_per_worker": {"GPU": 1}},
    {"kind": "slurm", "partition": None, "wait_s": 60},
    {"kind": "dask", "address": "tcp://head:8786"},
    {"kind": "kubernetes", "limits": {"nvidia.com/gpu": "8"}, "pod_spec": {"serviceAccountName": "trainings"}},
    "torch-cluster/slurm",
)
COPY = "rsync -a {source} {target}"
SYNC = {"upload": COPY, "download": "module:function", "target": "me@host:/there", "period_s": 5, "timeout_s": 60.5}
# JSON of every kind that each field takes; a few fields need others beside them.
TAKEN_BY_MODELS = {
    ScalingConfig: (
        {"num_workers": 8, "use_gpu": True, "backend": "nccl", "timeout_s": 60, "wait_for_gpus_s": 0},
        {"num_workers": [2, 8], "regrow_after_s": 60},
        *({"cluster": cluster} for cluster in CLUSTERS),
    ),
    RunConfig: (
        {"name": "digits", "resume": "never", "takeover": True, "yields_to_urgent": True, "storage_deadline_s": 1.5},
        {"verify": "size", "working_dir": "code", "log_ranks": "rank0", "log_level": "INFO", "sync": SYNC},
        *({"storage": storage} for storage in ("s3://bucket/x", "s3-bucket/name", {"location": "/x"}, {"bucket_name": "b"})),
    ),
    CheckpointConfig: (
        {"checkpoint_score_attribute": "a/b", "checkpoint_score_order": "min", "evaluation_timeout_s": 60},
        {"num_to_keep": 2, "keep_last": 2, "keep_every_n_steps": 10, "keep_quarantined_days": 0},
        {"max_in_flight": 2, "target_overhead": 0.01},
    ),
    FailureConfig: (
        {"max_failures": -1, "max_infrastructure_failures": 0, "max_out_of_memory_failures": 1, "max_preemptions": 1},
        {"retry_delay_s": [0, 10.5], "retry_jitter_factor": 0.2, "grace_s": 0, "hang_timeout_s": 60},
        {"retry_delay_s": 10},
    ),
    SearchConfig: (
        {"metric": "loss", "mode": "min", "num_trials": 4, "max_concurrent": 2, "sampler": "tpe", "seed": 0},
        {"metric": ["loss", "cost"], "mode": ["min", "max"], "initial_points": [{"lr": 0.1}]},
        {"metric": "loss", "scheduler": "asha", "grace_period": 0.5, "reduction_factor": 2.5, "max_t": 9, "time_attr": "s"},
        {"metric": "loss", "scheduler": "pbt", "perturbation_interval": 2, "stop": {"loss": 1}},
        {"metric": "loss", "scheduler": "pruner", "pruner": "optuna.pruners:MedianPruner", "max_failed_trials": 0},
        {"metric": "loss", "time_budget_s": 60, "keep_best_trials": 2, "restart_errored": True},
    ),
}
SPACE = {"lr": {"kind": "loguniform", "low": 1e-4, "high": 0.1}, "layers": {"width": {"kind": "choice", "values": [1, None]}}}
OTHERS = {"config": ({}, {"lr": 0.1, "nested": {"x": [1, None]}}), "resume_from": ("", "run/000001-00000004-8260df80")}
TAKEN_BY_FLOWS = {
    train: {"train_fn": ("m:f",), **OTHERS},
    sweep: {"train_fn": ("path/to/file.py:f",), "space": (SPACE,), "config": OTHERS["config"], "trials_on": ("train/gpu",)},
    evaluate: {
        "eval_fn": ("m:f",),
        "storage": ("./checkpoints", {"location": "/x"}),
        "run": ("digits",),
        "checkpoints": (["best"], "latest", None),
        "config": OTHERS["config"],
        "name": ("eval",),
        "watch": (True,),
        "poll_s": (1, 0.5),
        "working_dir": ("code",),
        "log_ranks": ("local0",),
        "log_level": ("INFO", None),
    },
    prune: {
        "storage": ("./checkpoints", {"location": "/x"}),
        "runs": (["digits"], None),
        "checkpoint": ({"num_to_keep": 1}, None),
        "dry_run": (True,),
    },
    resume: {
        "flow_run": ("prefect.flow-run.x",),
        "max_restarts": (0,),
        "silent_s": (1.5,),
        "confirm_s": (0,),
        "pending_s": (60, None),
    },
}
SCHEMAS = {flow: parameter_schema(flow) for flow in TAKEN_BY_FLOWS}
GROUPS_OF_SWEEP = {**GROUPS, "search": SearchConfig}


def taken():
    """Yield each flow with parameters that it takes."""
    for flow, values in TAKEN_BY_FLOWS.items():
        needed = {name: values[name][0] for name in SCHEMAS[flow].required}
        for name, choices in values.items():
            yield from ((flow, {**needed, name: choice}) for choice in choices)
        for group in GROUPS_OF_SWEEP.keys() & SCHEMAS[flow].properties.keys() - values.keys():
            yield from ((flow, {**needed, group: choice}) for choice in TAKEN_BY_MODELS[GROUPS_OF_SWEEP[group]])


@pytest.mark.parametrize(("flow", "parameters"), list(taken()))
def test_a_deployment_takes_all_parameters_that_the_flow_takes(flow, parameters):
    flow.validate_parameters(parameters)
    assert [error.message for error in validate(parameters, SCHEMAS[flow].model_dump_for_openapi())] == []


def test_every_parameter_and_every_field_of_a_group_is_tried_as_json():
    for flow, values in TAKEN_BY_FLOWS.items():
        assert values.keys() | GROUPS_OF_SWEEP.keys() >= SCHEMAS[flow].properties.keys(), flow.name
    for model, tried in TAKEN_BY_MODELS.items():
        assert {name for fields in tried for name in fields} == model.model_fields.keys()
    assert SYNC.keys() == SyncConfig.model_fields.keys()
