"""The page of the command line has every command with every option, and what it says works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from prefect_torch.deployments.command_line.program import prefect_torch as program

PAGE = (Path(__file__).parents[2] / "docs/how-to/command-line.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\S+)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
OF_SEVERAL = {"--json", "--metric", "--order"}  # which the page introduces before
COMMANDS = program.list_commands(None)


def test_every_command_has_a_section_and_no_other():
    assert sorted(SECTIONS) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_section_has_an_example_and_every_option(name):
    command = program.get_command(None, name)
    section = SECTIONS[name]
    assert f"$ prefect-torch {name}" in section
    options = {option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts}
    shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", section))
    assert options - shown - OF_SEVERAL == set()
    assert {option for option in shown if option.startswith("--")} <= {*options, "--help"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns(name):
    command = program.get_command(None, name)
    text = command.get_help(click.Context(command, info_name=f"prefect-torch {name}", terminal_width=80, max_content_width=80))
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("shell", "mark"), [("bash", "complete -o nosort"), ("zsh", "#compdef prefect-torch"), ("fish", "complete --no-files")]
)
def test_completion_is_generated_for_each_shell_of_the_page(shell, mark):
    assert f"_PREFECT_TORCH_COMPLETE={shell}_source prefect-torch" in PAGE
    assert mark in completed({"_PREFECT_TORCH_COMPLETE": f"{shell}_source"})


def test_a_command_and_its_options_are_completed():
    typed = {"_PREFECT_TORCH_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    assert completed({**typed, "COMP_WORDS": "prefect-torch wa"}) == "plain,watch\n"
    assert "plain,--csv\n" in completed({**typed, "COMP_WORDS": "prefect-torch metrics --c", "COMP_CWORD": "2"})


def completed(environment):
    script = Path(sys.executable).with_name("prefect-torch")
    done = subprocess.run([script], env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.stderr.replace("Couldn't detect Bash version, shell completion is not supported.\n", "") == ""
    return done.stdout
