"""The option --plugins of every command that may need other people's code."""

from typing import Any

import click
from typer.core import TyperCommand

from perennial.foundation import plugins

HELP = "installed package, or folder of modules, whose code you trust and this command may run; repeatable"


class WithPlugins(TyperCommand):
    """A command with --plugins; those named are in use while it runs, and no others."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.params.append(
            click.Option(
                ["--plugins"],
                multiple=True,
                metavar="NAME|FOLDER",
                help=HELP,
                expose_value=False,
                callback=_put_in_use,
            )
        )


def _put_in_use(context: click.Context, parameter: click.Parameter, named: tuple[str, ...]) -> None:
    context.with_resource(plugins.use_also(named))
