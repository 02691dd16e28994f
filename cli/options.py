"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

InContainer = Annotated[bool, typer.Option(help="the port is published on the host's loopback alone")]
WebhookFile = Annotated[Path | None, typer.Option(help="file with the address to tell what needs somebody")]
MailFile = Annotated[Path | None, typer.Option(help="file that says how to send the same by e-mail")]
