"""The README is true, and so is the table of settings; tests/flows/test_readme_trainings.py has its training on other ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import forked_programs
import pytest
from prefect_torch.flows import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SETTINGS = (ROOT / "docs/reference/settings.md").read_text()
PROGRAMS = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", README, re.DOTALL)
(OUTPUT,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line[2:].partition("#")[0].strip()
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


def test_it_is_read_in_some_minutes():
    assert len(README.splitlines()) <= 200


def test_every_block_is_a_program_or_commands():
    blocks = re.findall(r"^```(\w+)$", README, re.MULTILINE)
    assert len(blocks) == len(PROGRAMS) + README.count("```console") + README.count(OUTPUT)


@pytest.mark.timeout(400)
def test_the_programs_run_in_order(tmp_path):
    """With nothing but Prefect's embedded server, as on a machine that never saw Prefect."""
    printed, environment = {}, {**os.environ, "PREFECT_HOME": str(tmp_path / "home")}
    for name, program in PROGRAMS:
        (tmp_path / name).write_text(program.replace("serve(nightly)", "print(nightly.name)"))
        is_new = name == "run.py"  # what else it imports first, it would find there in a forked one
        done = run_program([name], tmp_path, environment, run=subprocess.run if is_new else forked_programs.run_program)
        printed[name] = done.stdout
        if is_new:
            assert_same_output(done, OUTPUT)
    assert printed["look.py"].startswith("1 None [{'val_loss'")
    assert len(printed["look.py"].splitlines()) in (3, 4)  # the best two, and the latest
    assert printed["schedule.py"].strip() == "nightly"
    scripts = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in COMMANDS:
        if command.startswith("prefect-torch"):
            done = subprocess.run(command.split(), cwd=tmp_path, env=scripts, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), command
    assert any((tmp_path / "model").iterdir())


def run_program(arguments, folder, environment, run):
    """Return a program that has ended, with what it printed; one that fails is an error."""
    done = run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def assert_same_output(done, shown):
    """Compare what was printed with what README shows; the lines of several threads and processes have no order."""
    lines, numbers = normalized(without_the_servers_own(done.stderr) + done.stdout)
    shown_lines, shown_numbers = normalized(shown)
    assert lines == shown_lines, done.stderr
    assert numbers == pytest.approx(shown_numbers, rel=0.2)  # processors and versions of torch differ in the last digits


def without_the_servers_own(log):
    """Leave out what a temporary server says of itself, such as its telemetry, which fails without a network."""
    records = re.split(r"^(?=[0-9:.]{12} \|)", log, flags=re.MULTILINE)
    return "".join(record for record in records if " | prefect.server." not in record)


def normalized(output):
    """Return the sorted lines without times, ids, locations and numbers, and the numbers."""
    varying = {
        r"^[0-9:.]{12} ": "TIME ",
        r"\b000001-0000000(\d)-[0-9a-f]{8}\b": r"ID-\1",
        r"'first-[a-z]+-[a-z]+'": "'FLOW-RUN'",
        r"127\.0\.0\.1:[0-9]+": "ADDRESS",
        r"(are in) \S+/checkpoints/": r"\1 DIRECTORY/checkpoints/",
        r"https://(docs\.prefect\.io|www\.prefect\.io/docs)/": "PREFECT-DOCS/",  # the second since 3.9
    }
    lines = output.splitlines()
    for pattern, name in varying.items():
        lines = [re.sub(pattern, name, line) for line in lines]
    lines.sort(key=lambda line: re.sub(r"\d\.\d+", "", line))
    numbers = [float(number) for line in lines for number in re.findall(r"val_loss (\d\.\d+)", line)]
    return [re.sub(r"\d\.\d+", "NUMBER", line) for line in lines], numbers


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_what_is_made_can_be_made(command):
    subprocess.run(["make", "--dry-run", *command.split()[1:]], cwd=ROOT, check=True, capture_output=True)


def test_every_other_command_is_run():
    """Those of `prefect-torch` above; as pip's, so installs the Makefile, and tests/test_packaging.py builds the wheel."""
    others = [command for command in COMMANDS if not command.startswith(("make ", "prefect-torch "))]
    assert others == ["pip install -c constraints.txt ."]
    assert "pip install -qq --no-deps --no-build-isolation -c constraints.txt -e ." in (ROOT / "Makefile").read_text()


def test_the_table_of_settings_is_complete():
    for config in (ScalingConfig, RunConfig, CheckpointConfig, FailureConfig):
        for field in config.model_fields:
            assert f"{field}`" in SETTINGS, f"{config.__name__}.{field} is missing in docs/reference/settings.md"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
