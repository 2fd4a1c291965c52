"""What several commands are given, spelled once."""

import click

storage_argument = click.argument("storage", metavar="STORAGE")
run_argument = click.argument("run", metavar="RUN")
checkpoint_argument = click.argument("checkpoint", metavar="ID")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with the keys that are named above.")
metric_option = click.option("--metric", metavar="NAME", help='The metric to rank by; "a/b" for a nested one.')
order_option = click.option("--order", type=click.Choice(["min", "max"]), help="Whether a low or a high value is better.")
