"""The subcommands of the command line: one file each, with `add_arguments(parser)` and `run(args) -> exit code`."""
