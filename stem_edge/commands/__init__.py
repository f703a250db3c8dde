"""The command stem-edge: each subcommand has a file that parses arguments and prints results.

Each file has DESCRIPTION and EPILOG for its help, `add_arguments`, and `run`, which returns the exit status.
The work itself is done by functions that Python users can call, too.
"""
