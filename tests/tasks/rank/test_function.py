import functools
import gc
import importlib.util
import inspect
import linecache
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import cloudpickle
import pytest
from prefect_torch.ckpt.context import TrainContext, set_context
from prefect_torch.ckpt.text import name_of
from prefect_torch.tasks import SyncConfig
from prefect_torch.tasks.gang.processes.fork_servers import python_command
from prefect_torch.tasks.rank.program.call import _call
from prefect_torch.tasks.rank.user_code.function import pack_function, unpack_function
from prefect_torch.tasks.rank.user_code.function_reference import check_signature, takes_config
from prefect_torch.tasks.rank.user_code.shadowing import check_is_package


def in_a_new_interpreter(packed) -> str:
    """Return what the function gives there; its standard output is its answer."""
    program = (
        "import pickle, sys, os\npacked = pickle.load(sys.stdin.buffer)\nos.chdir(packed.cwd)\nsys.path[:] = packed.sys_path\n"
        "from prefect_torch.tasks.rank.user_code.function import unpack_function\nfunction, config = unpack_function(packed)\n"
        "print(function(config))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=cloudpickle.dumps(packed), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "beside_it.py").write_text("VALUE = 'beside'")
    (tmp_path / "user_training.py").write_text(
        "import beside_it\nfrom os.path import join as renamed\n"
        "def train_fn(config):\n    return beside_it.VALUE, config\n"
        "alias = train_fn\nnot_a_function = 3\nif __name__ == '__main__':\n    raise SystemExit('ran as a program')\n"
    )
    (tmp_path / "broken.py").write_text("def train_fn(:\n")
    (tmp_path / "nothing.py").write_bytes(b"def train_fn(): pass\n\0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["train_fn", "alias"])
@pytest.mark.parametrize("place", ["user_training", "user_training.py", "./user_training.py"])
def test_a_reference_is_found_in_the_working_folder(folder, place, name):
    assert in_a_new_interpreter(pack_function(f"{place}:{name}", {"a": 1})) == "('beside', {'a': 1})"


def test_each_call_finds_the_modules_of_its_own_directory(tmp_path, monkeypatch):
    """Also where an earlier call from another directory, or with another `working_dir`, has found one of the same name."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("a", "b", "project", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "their_training.py").write_text(
            f"def train_fn(): pass\ndef in_{name}(config):\n    return {name!r}\n"
        )
    for name in ("a", "b", "a"):
        monkeypatch.chdir(tmp_path / name)
        assert in_a_new_interpreter(pack_function(f"their_training:in_{name}", {})) == name
    for name in ("project", "other", "project"):
        pack_function(f"their_training:in_{name}", {}, tmp_path / name)
    monkeypatch.syspath_prepend(tmp_path / "b")
    pack_function("their_training:in_b", {}, tmp_path / "project")  # what the process itself searches comes first
    assert str(tmp_path / "b") == sys.path[0]


def test_a_function_that_travels_by_value_keeps_the_file_of_its_code():
    """Tracebacks show its lines, `inspect` its source."""

    def train_fn(config):
        return [lambda: config["a"], train_fn.__code__.co_filename]

    function, _ = unpack_function(pack_function(train_fn, {"a": 1}))
    inner, file = function({})
    assert {file, inner.__code__.co_filename, function.__code__.co_filename} == {__file__}
    assert inspect.getsource(function) == inspect.getsource(train_fn)


def test_a_file_named_as_a_standard_module_replaces_it_for_nobody(folder):
    (folder / "trainings").mkdir()
    (folder / "trainings/beside_queue.py").write_text("import queue\nVALUE = queue.Queue.__name__\n")
    (folder / "trainings/queue.py").write_text(
        "import beside_queue, pickle, sys\nclass Result: pass\n"
        "def train_fn(config):\n"
        "    import queue\n"
        "    assert pickle.loads(pickle.dumps(Result())).__class__ is Result\n"
        "    return beside_queue.VALUE, queue.__file__ == sys.modules['queue'].__file__, queue.Queue.__module__, __file__\n"
    )
    answer = in_a_new_interpreter(pack_function("trainings/queue.py:train_fn", None))
    assert answer == str(("Queue", True, "queue", str(folder / "trainings/queue.py")))


def test_a_module_that_is_the_standard_one_is_named_with_the_way_to_a_file(folder):
    (folder / "queue.py").write_text("def train_fn(config): pass\n")
    with pytest.raises(ValueError, match=r"queue\.py defines no 'train_fn' \(for a file of yours, give queue\.py:train_fn\)"):
        pack_function("queue:train_fn", None)


def test_a_rank_looks_for_no_module_in_the_folder_that_it_is_started_in(folder):
    for name in ("queue", "importlib", "sys"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    (folder / "lib").mkdir()
    (folder / "lib/program.py").write_text("import queue\ndef main(): print(queue.Queue.__module__)\n")
    assert output_of_program(python_command("program"), folder / "lib") == ("queue\n", "")


def test_a_rank_finds_the_package_where_the_program_has_added_it_to_its_search_path(folder, monkeypatch):
    """As in a PEX, or after `site.addsitedir`: a new interpreter lacks it, as this one does without `site`."""
    (folder / "program.py").write_text(
        "import prefect_torch, torch\nmain = lambda: print(prefect_torch.__file__, torch.__file__)\n"
    )
    monkeypatch.syspath_prepend(folder)
    command, here = python_command("program"), [importlib.util.find_spec(name).origin for name in ("prefect_torch", "torch")]
    assert output_of_program([command[0], "-S", *command[1:]], folder) == (" ".join(here) + "\n", "")


def test_a_rank_imports_the_package_of_the_program_where_the_interpreter_has_another_one(folder, monkeypatch):
    """As in a PEX, or after `sys.path.insert`; what the package needs has the program's version, too."""
    for name in ("prefect_torch", "filelock"):
        (folder / f"lib/{name}").mkdir(parents=True)
        (folder / f"lib/{name}/__init__.py").write_text("raise SystemExit('the wrong one')")
    (folder / "queue.py").write_text("raise SystemExit('the wrong one')")
    (folder / "program.py").write_text(
        "import filelock, prefect_torch, queue\nmain = lambda: print(filelock.__file__, prefect_torch.__file__, queue.Queue)\n"
    )
    monkeypatch.syspath_prepend(folder)
    here = [importlib.util.find_spec(name).origin for name in ("filelock", "prefect_torch")]
    told = output_of_program(python_command("program"), folder / "lib")
    assert told == (f"{' '.join(here)} <class 'queue.Queue'>\n", "")


def output_of_program(command, search_path) -> tuple[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(search_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def test_functions_that_are_looked_up_in_several_threads_do_not_disturb_each_other(folder):
    """As ast.parse does before CPython 3.11.8: another thread runs in the middle of it where garbage collection lets it."""

    def look_up() -> None:
        for _ in range(100):
            pack_function("user_training:train_fn", None)

    def let_another_run(_phase, _info) -> None:
        time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(let_another_run)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(2) as pool:
            for looked_up in [pool.submit(look_up) for _ in range(2)]:
                looked_up.result()
    finally:
        gc.callbacks.remove(let_another_run)
        gc.set_threshold(*before)


@pytest.mark.parametrize(
    "program",
    [
        "from os.path import *",
        "from os.path import \\\n    *",
        "def make():\n    global train_fn\n    def train_fn(config): pass\nmake()",
        "# -*- coding: latin-1 -*-\n# \xe9\ndef train_fn(config): pass",
        "if (train_fn := print): pass",
        "import os.path as train_fn",
        "class train_fn: pass",
        "for train_fn in [print]: pass",
        "def __getattr__(name): return print",
        "__getattr__, __dir__, __all__ = print, dir, []",
    ],
)
def test_a_name_may_be_bound_in_any_way(folder, program):
    (folder / "binding.py").write_bytes(program.encode("latin-1"))
    pack_function("binding.py:train_fn", None)


def test_a_reference_is_looked_up_but_not_imported(folder):
    pack_function("user_training:train_fn", None)
    assert "user_training" not in sys.modules


def test_the_packages_of_a_reference_are_not_imported(folder):
    """They may import for seconds, initialize a GPU, or need what only ranks have."""
    (folder / "pkg/sub").mkdir(parents=True)
    (folder / "pkg/__init__.py").write_text("raise KeyError('only ranks have it')")
    (folder / "pkg/sub/__init__.py").touch()
    (folder / "pkg/sub/training.py").write_text("def train_fn(config): pass")
    pack_function("pkg.sub.training:train_fn", None)
    with pytest.raises(ValueError, match=r"'pkg\.training' cannot be found: KeyError: 'only ranks have it'"):
        pack_function("pkg.training:train_fn", None)
    assert not [name for name in sys.modules if name.partition(".")[0] == "pkg"]


@pytest.mark.parametrize("has_own_path", [False, True])
def test_a_module_is_found_where_only_an_import_of_its_packages_shows_it(folder, has_own_path):
    """In a directory without __init__.py in another one, or where a package says."""
    (folder / "outer/inner").mkdir(parents=True)
    (folder / "outer/elsewhere").mkdir()
    if has_own_path:
        (folder / "outer/inner/__init__.py").write_text("__path__.append(__path__[0] + '/../elsewhere')")
    (folder / ("outer/elsewhere" if has_own_path else "outer/inner") / "training.py").write_text("def train_fn(config): pass")
    pack_function("outer.inner.training:train_fn", None)
    for name in ("outer.inner", "outer"):
        sys.modules.pop(name, None)


def test_a_module_in_a_zip_archive_is_found(folder, monkeypatch):
    """As those of a zipapp are."""
    with zipfile.ZipFile(folder / "code.zip", "w") as archive:
        archive.writestr("zipped_training.py", "def train_fn(config):\n    return __file__")
    monkeypatch.syspath_prepend(folder / "code.zip")
    found = in_a_new_interpreter(pack_function("zipped_training:train_fn", {}))
    assert found == str(folder / "code.zip/zipped_training.py")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("user_training:nosuch", "defines no 'nosuch'"),
        ("user_training:config", "defines no 'config'"),  # only within a function
        ("nothing.py:train_fn", "is not valid Python"),
        ("user_training.py:nosuch", "defines no 'nosuch'"),
        ("nosuch_module:f", "there is no module 'nosuch_module' .*: give 'path/to/file.py:function', or start in the"),
        ("nosuch/file.py:f", "there is no file"),
        ("broken:train_fn", "is not valid Python"),
        ("user_training", "give 'module:function'"),
        ("user_training:", "give 'module:function'"),
        ("", "give 'module:function'"),
    ],
)
def test_what_does_not_exist_is_named(folder, reference, message):
    with pytest.raises(ValueError, match=message):
        pack_function(reference, None)


def test_what_is_no_function_is_named_where_it_is_imported(folder):
    with pytest.raises(ValueError, match="has no function 'not_a_function'"):
        unpack_function(pack_function("user_training:not_a_function", None))
    sys.modules.pop("user_training", None)


def test_a_file_that_starts_its_own_training_wherever_it_is_imported_is_refused(folder):
    (folder / "unguarded.py").write_text(
        "from prefect_torch.tasks.rank.user_code.function import pack_function\n"
        "def train_fn(config):\n    pass\n"
        "pack_function('unguarded.py:train_fn', None)\n"
    )
    packed = pack_function("unguarded.py:train_fn", None)
    with pytest.raises(RuntimeError, match=r'unguarded.py:train_fn would start ranks itself.* `if __name__ == "__main__":`'):
        unpack_function(packed)
    pack_function("user_training:train_fn", None)


def test_a_rank_that_would_start_ranks_itself_is_refused():
    set_context(TrainContext(1, 1, 0, 2, 2, "digits", 1))
    try:
        with pytest.raises(RuntimeError, match="rank 1 of run 'digits' would start ranks itself, as would each of the 2"):
            pack_function("os:getcwd", None)
    finally:
        set_context(None)
    pack_function("os:getcwd", None)


@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("prefect", "import prefect_torch.flows"),
        ("torch", "from prefect_torch.tasks.rank.user_code.function import pack_function as pack; pack('os:getcwd', None)"),
        ("numpy", "from prefect_torch.tasks.rank.user_code.function import pack_function as pack; pack('os:getcwd', None)"),
    ],
)
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_a_file_that_is_found_in_the_place_of_a_package_is_named(tmp_path, name, statement, file):
    source = tmp_path / file.format(name)
    source.parent.mkdir(exist_ok=True)
    source.write_text("raise SystemExit('ran')")
    place = source.parent if source.stem == "__init__" else source
    done = subprocess.run([sys.executable, "-c", statement], cwd=tmp_path, capture_output=True, text=True, check=False)
    expected = f"ImportError: {place} is imported instead of the package {name!r}: rename it"
    assert done.stderr.strip().splitlines()[-1] == expected


@pytest.mark.parametrize("name", ["prefect", "torch", "numpy"])
def test_a_folder_of_a_packages_name_that_is_no_package_is_no_obstacle(tmp_path, monkeypatch, name):
    """It is imported only where there is no package: data beside the program, or what an uninstalled package has left."""
    (tmp_path / name / "data").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    check_is_package(name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check_is_package(name)


@pytest.mark.parametrize("value", [3, None, ["module:function"], object()])
def test_what_is_neither_a_function_nor_a_reference_is_refused(value):
    with pytest.raises(TypeError, match=r"^train_fn must be a function"):
        pack_function(value, None)
    with pytest.raises(TypeError, match=r"^eval_fn must be a function"):
        pack_function(value, None, evaluates=True)


def test_a_closure_travels_with_what_it_uses():
    offset = 40

    def train_fn(config):
        return helper(config["x"]) + offset

    assert in_a_new_interpreter(pack_function(train_fn, {"x": 1})) == "42"


def helper(x):
    return x + 1


class Pickled:
    """Calls what it is given while it is pickled."""

    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        self.call()
        return str, ()


def test_functions_of_one_module_that_several_threads_pack_all_travel_by_value(folder, monkeypatch):
    """One that is done must not end it for the others."""
    spec = importlib.util.spec_from_file_location("loaded_by_its_path", folder / "user_training.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(folder)
    spec.loader.exec_module(module)
    with ThreadPoolExecutor(1) as pool:
        others = []

        def meanwhile():
            others.append(pool.submit(pack_function, module.train_fn, {"a": 2}))
            wait(others, timeout=0.2)

        first = pack_function(module.train_fn, {"a": Pickled(meanwhile)})
        assert in_a_new_interpreter(first) == "('beside', {'a': ''})"
        assert unpack_function(others[0].result())[1] == {"a": 2}
    assert module.__name__ not in cloudpickle.list_registry_pickle_by_value()


def test_a_function_that_a_new_interpreter_can_import_travels_by_name():
    packed = pack_function(os.path.basename, None)
    assert len(packed.payload) < 100
    assert unpack_function(packed)[0] is os.path.basename


@pytest.mark.parametrize("what", [threading.Lock(), Path(__file__).open, (value for value in [1])])
def test_what_cannot_travel_is_a_type_error(what):
    with pytest.raises(TypeError, match="cannot travel to the ranks"):
        pack_function(helper, {"what": what} if not callable(what) else {"what": threading.Lock()})


async def coroutine(config): ...
def generator(config): yield  # fmt: skip


async def async_generator(config): yield  # fmt: skip


def needs_two(config, other): ...
def needs_a_keyword(*, config): ...


class Trainer: ...  # fmt: skip


class Callable:
    async def __call__(self, config): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (coroutine, "coroutine is async or a generator"),
        (generator, "generator is async or a generator"),
        (async_generator, "async_generator is async or a generator"),
        (functools.partial(coroutine, None), "async or a generator"),
        (Callable(), "async or a generator"),
        (needs_two, r"^function needs_two\(config, other\) must take one argument"),
        (needs_a_keyword, "must take one argument"),
        (Trainer, "Trainer is a class"),
    ],
)
def test_what_a_rank_could_not_run_to_its_end_is_refused(function, message):
    with pytest.raises(TypeError, match=message):
        pack_function(function, None)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (needs_two, "needs_two"),
        (functools.partial(functools.partial(needs_two, other=bytes(10**6)), 1), "needs_two"),
        (Trainer(), "Trainer"),
    ],
    ids=["function", "partial", "object"],
)
def test_the_name_of_a_function_has_none_of_its_data(function, name):
    """A sweep stores it, and each rank has it as sys.argv[0]."""
    assert name_of(function) == name


def test_a_partial_is_shown_with_the_module_of_its_function():
    partial = functools.partial(needs_two, other=bytes(10**6))
    shown = SyncConfig(upload=partial, download=needs_two, target="x").model_dump(mode="json")
    assert shown["upload"] == shown["download"] == f"{__name__}:needs_two"


@pytest.mark.parametrize(
    ("function", "is_given_it"),
    [
        (lambda: 0, False),
        (lambda config: 0, True),
        (lambda *args: 0, True),
        (lambda config=None: 0, True),
        (lambda *, verbose=False: 0, False),
        (lambda **options: 0, False),
        (functools.partial(needs_two, other=1), True),
        (print, True),
    ],
)
def test_a_function_gets_its_configuration_if_it_can_take_it(function, is_given_it):
    assert takes_config(check_signature(function)) is is_given_it


@pytest.mark.parametrize(
    ("function", "config", "value"),
    [
        (lambda epochs=5: epochs, None, 5),
        (functools.partial(lambda epochs, lr=0.1: (epochs, lr), 5), None, (5, 0.1)),
        (lambda *arguments: arguments, None, ()),
        (lambda config: config, None, {}),
        (lambda config=None: config, {"a": 1}, {"a": 1}),
        (lambda config=None: config, {}, None),  # as the Run form gives it if it is left empty
    ],
)
def test_a_function_that_needs_no_argument_gets_one_only_if_a_config_is_given(function, config, value):
    assert _call(check_signature(function), config, evaluates=False) == value


def validate(checkpoint, threshold, *, scale=1):
    return checkpoint, threshold, scale


def test_an_evaluation_may_take_the_checkpoint_as_rays_do(monkeypatch):
    monkeypatch.setattr("prefect_torch.tasks.rank.program.call.get_checkpoint", lambda: "the checkpoint")
    function, config = unpack_function(pack_function(validate, {"threshold": 2}, evaluates=True))
    assert _call(function, config, evaluates=True) == ("the checkpoint", 2, 1)
    assert _call(lambda checkpoint: checkpoint, None, evaluates=True) == "the checkpoint"
    assert _call(lambda checkpoint: checkpoint, {"a": 1}, evaluates=False) == {"a": 1}
    with pytest.raises(TypeError, match=r"one argument, the config, or none$"):
        pack_function(validate, None)
    with pytest.raises(TypeError, match="or the checkpoint, as a first argument of that name"):
        pack_function(needs_two, None, evaluates=True)


def test_an_evaluation_that_takes_the_checkpoint_and_the_whole_config_is_told_that_it_gets_the_items_by_name(monkeypatch):
    monkeypatch.setattr("prefect_torch.tasks.rank.program.call.get_checkpoint", lambda: "the checkpoint")

    def measure(checkpoint, config):
        raise AssertionError

    told = (
        r"measure\(checkpoint, config\) gets the checkpoint, and each item of the config as an argument of its name: missing a"
    )
    for config in ({"batch_size": 8}, None):
        with pytest.raises(TypeError, match=told):
            _call(measure, config, evaluates=True)


@pytest.mark.parametrize(("root", "module"), [("package", "package.inner.training"), ("package/inner", "inner.training")])
def test_a_relative_import_in_a_file_is_answered_with_its_module(folder, root, module):
    (folder / "package/inner").mkdir(parents=True)
    (folder / root / "__init__.py").touch()
    (folder / "package/inner/__init__.py").touch()
    (folder / "package/inner/training.py").write_text("from .model import Model\ndef train_fn(config): pass\n")
    (folder / "package/inner/model.py").write_text("Model = object\n")
    packed = pack_function("package/inner/training.py:train_fn", None)
    with pytest.raises(
        ImportError, match=f"relative import.*: a file is no part of a package: give '{module}:train_fn'"
    ) as caught:
        unpack_function(packed)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_traceback_shows_the_lines_of_a_notebooks_cell():
    cell, text = "/tmp/ipykernel_1/2.py", "def train_fn(config):\n    return 1 / config['zero']  # of a cell\n"
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    defined = {"__name__": "__main__"}
    exec(compile(text, cell, "exec"), defined)
    packed = pack_function(defined["train_fn"], {"zero": 0})
    del linecache.cache[cell]
    function, config = unpack_function(packed)
    with pytest.raises(ZeroDivisionError) as caught:
        function(config)
    assert "return 1 / config['zero']  # of a cell" in "".join(traceback.format_exception(caught.value))
    del linecache.cache[cell]
