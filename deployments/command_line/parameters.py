"""Arguments and options of several commands."""

import click

storage_argument = click.argument("storage", metavar="STORAGE")
run_argument = click.argument("run", metavar="RUN")
checkpoint_argument = click.argument("checkpoint", metavar="ID")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with the keys named above.")
metric_option = click.option("--metric", metavar="NAME", help='The metric to sort by; "a/b" for a nested one.')
order_option = click.option("--order", type=click.Choice(["min", "max"]), help="Whether a low or a high value is better.")
