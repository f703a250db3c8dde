"""The command stem-edge: a file for each subcommand, which parses arguments and prints results.

Each has DESCRIPTION and EPILOG for its help, `add_arguments`, and `run`, which returns the exit status.

The work itself is done by functions of the package that Python users call, too.
"""
