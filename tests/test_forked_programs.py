"""A forked program is a process as any other, but for its imports."""

import ast
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from _pytest.assertion import rewrite
from forked_programs import FORKED, Popen, PopenOfProgram, run_program
from prefect.server.api.server import SubprocessASGIServer
from prefect_torch.tasks.gang.engines.agent_process import AGENT
from prefect_torch.tasks.gang.gpus.listing import list_gpus
from prefect_torch.tasks.gang.processes.fork_servers import python_command
from prefect_torch.tasks.gang.processes.process import RankProcess
from prefect_torch.tasks.prefect_api.embedded_server.tying import tie_new_servers

IS_FORKED = "import sys; assert 'torch' in sys.modules and 'prefect' in sys.modules, 'it is new'\n"


def output_of(program, *arguments, **options):
    command = [sys.executable, "-c", IS_FORKED + program, *arguments]
    return run_program(command, capture_output=True, text=True, check=True, **options).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="programs are started as usual elsewhere")
class TestForked:
    @pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="this process runs all tests")
    def test_a_worker_of_the_tests_is_one(self):
        assert "program_server" in sys.modules

    @pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="this process runs all tests")
    def test_a_worker_of_the_tests_finds_all_of_them_compiled(self, request):
        rewritten = request.config.stash[rewrite.assertstate_key].hook._rewritten_names.values()
        files = [file for file in rewritten if file.is_relative_to(Path(__file__).parent)]  # plugins import some later
        assert Path(__file__) in files
        assert [file for file in files if not (rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)).exists()] == []

    def test_a_server_that_is_one_waits_for_messages_without_threads(self):
        pytest.importorskip("burner_redis.pubsub", reason="Prefect's older versions have none")
        program = """
import asyncio, program_server
from burner_redis.pubsub import PubSub
program_server._look_less_often()
asyncio.to_thread, messages = None, PubSub(None)
messages._queue.put("one")
assert [asyncio.run(messages._queue_get(timeout)) for timeout in (None, 0.0, 0.05)] == ["one", None, None]
"""
        output_of(program)

    def test_its_command_environment_folder_and_parent_are_those_that_were_given(self, tmp_path):
        program = IS_FORKED + "import os; os.read(0, 1)"
        given = {**os.environ, "MARK": "here"}
        with Popen([sys.executable, "-c", program, "word"], cwd=tmp_path, env=given, stdin=subprocess.PIPE) as started:
            process = psutil.Process(started.pid)
            assert process.ppid() == os.getpid()
            assert process.cmdline() == [sys.executable, "-c", program, "word"]
            assert process.environ() == given
            assert process.cwd() == str(tmp_path)
            assert os.getsid(started.pid) == os.getsid(0)
            started.stdin.close()
        assert started.returncode == 0

    def test_it_has_its_input_output_arguments_and_variables(self):
        program = "import os; print(sys.argv, sys.stdin.read(), os.environ['MARK'], __name__); print('bad', file=sys.stderr)"
        done = run_program(
            [sys.executable, "-c", IS_FORKED + program, "word"],
            env={**os.environ, "MARK": "here"},
            input="given",
            capture_output=True,
            text=True,
        )
        assert (done.stdout, done.stderr) == ("['-c', 'word'] given here __main__\n", "bad\n")

    def test_it_is_one_if_it_is_not_to_write_bytecode(self):
        """As multiprocessing starts its server where this process has that from a variable."""
        run_program([sys.executable, "-B", "-c", IS_FORKED], check=True)

    def test_it_has_no_other_descriptors_than_those_that_were_passed_on(self, tmp_path):
        end, other = os.pipe()
        listed = """import os
folder = "/proc/self/fd"
numbers = [int(name) for name in os.listdir(folder)]  # and that of the folder, closed by now
print({it: os.readlink(f"{folder}/{it}") for it in numbers if it > 2 and os.path.lexists(f"{folder}/{it}")})
"""
        found = ast.literal_eval(output_of(listed, pass_fds=[end]))
        os.close(end)
        os.close(other)
        assert found.pop(end).startswith("pipe:")
        assert [kind.partition(":")[0] for kind in found.values()] == ["socket"], "that of its own server"

    @pytest.mark.parametrize(
        ("program", "code", "told"),
        [
            ("sys.exit(3)", 3, ""),
            ("import os; os._exit(4)", 4, ""),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
            ("raise KeyboardInterrupt", -2, 'File "<string>", line 2, in <module>\nKeyboardInterrupt\n'),
            (
                "raise ValueError(1)",
                1,
                'Traceback (most recent call last):\n  File "<string>", line 2, in <module>\nValueError: 1\n',
            ),
        ],
    )
    def test_it_ends_as_a_new_one(self, program, code, told):
        ended = run_program([sys.executable, "-c", IS_FORKED + program], capture_output=True, text=True)
        assert ended.returncode == code
        assert ended.stderr.endswith(told)

    def test_it_can_be_killed_with_its_session(self):
        program = IS_FORKED + "import time; print('up', flush=True); time.sleep(60)"
        with Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout.readline() == b"up\n"
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait(10) == -signal.SIGKILL

    def test_a_file_is_run_with_its_folder_on_the_path(self, tmp_path):
        (tmp_path / "beside.py").write_text("VALUE = 7")
        program = tmp_path / "program.py"
        program.write_text(f"{IS_FORKED}import beside; print(__file__, sys.path[0], beside.VALUE)")
        done = run_program([sys.executable, program], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(program), str(tmp_path), "7"]

    def test_it_imports_what_the_interpreter_imports_of_its_path_when_it_starts(self, tmp_path):
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = True")
        assert output_of("print(sys.customized)", env={**os.environ, "PYTHONPATH": str(tmp_path)}) == "True\n"

    def test_prefect_has_the_settings_of_its_variables(self):
        program = "from prefect.settings import PREFECT_API_URL; print(PREFECT_API_URL.value())"
        environment = {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api"}
        assert output_of(program, env=environment) == "http://127.0.0.1:9/api\n"

    def test_random_numbers_differ(self):
        program = "import random, torch, numpy; print(random.random(), torch.rand(1).item(), numpy.random.rand())"
        assert set(output_of(program).split()).isdisjoint(output_of(program).split())

    def test_torch_has_as_many_threads_as_it_is_given(self):
        program = "import torch; print(torch.get_num_threads())"
        assert output_of(program, env={**os.environ, "OMP_NUM_THREADS": "3"}) == "3\n"

    def test_it_is_one_though_torch_has_set_its_own_variable_here(self):
        """As where a test of this worker has imported its compiler before."""
        assert output_of("print('it is')", env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor"}) == "it is\n"

    def test_with_another_variable_that_is_read_at_import_it_is_new(self):
        command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
        environment = {**os.environ, "MKL_NUM_THREADS": "3"}
        assert run_program(command, env=environment, capture_output=True, text=True).stdout == "False\n"

    def test_a_node_agent_is_one_and_so_is_its_guard_with_which_it_dies(self, monkeypatch):
        monkeypatch.setattr(subprocess, "Popen", PopenOfProgram)
        with socket.create_server(("127.0.0.1", 0)) as leader:
            command = f"{sys.executable} -m {AGENT} 127.0.0.1:{leader.getsockname()[1]}"
            process = RankProcess(["sh", "-c", f"exec {command}"], dict(os.environ), b"key\n")
            connection, _ = leader.accept()
            with connection:
                guard = psutil.Process(process._guard.pid)
                (agent,) = [it for it in guard.children() if AGENT in it.cmdline()]
                assert agent.cmdline() == shlex.split(command)
                assert all("libtorch" in Path(f"/proc/{it.pid}/maps").read_text() for it in (guard, agent))
                guard.kill()
                assert not psutil.wait_procs([agent], 10)[1]
                process.reap()


def test_the_fork_server_of_ranks_is_known_by_its_command():
    command = [*python_command("prefect_torch.tasks.rank.starting.fork_server"), "5", "/torch"]
    assert FORKED.search(" ".join(command[1:]))


def test_the_listing_of_gpus_is_known_by_its_command(refused):
    with pytest.raises(OSError, match=r"^$"):
        list_gpus()
    assert FORKED.search(" ".join(refused[0][1:]))


def test_prefects_embedded_server_is_known_by_its_command(refused):
    tie_new_servers()
    with pytest.raises(OSError, match=r"^$"):
        SubprocessASGIServer(port=1)._run_uvicorn_command()
    assert FORKED.search(" ".join(refused[0][1:]))


@pytest.fixture
def refused(monkeypatch) -> list[list[str]]:
    """The commands that were to be started meanwhile; none is."""
    commands = []

    def refuse(command, **_):
        commands.append(command)
        raise OSError

    monkeypatch.setattr(subprocess, "Popen", refuse)
    return commands
