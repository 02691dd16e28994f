"""The `perennial` command. Each subcommand imports what it needs when it is called, so that --help is
immediate."""
