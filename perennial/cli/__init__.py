"""The `perennial` command, whose subcommands import what they need only when they are called."""
