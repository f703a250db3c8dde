"""The command stem-edge: each subcommand has a file that parses arguments and prints results.

Each has DESCRIPTION and EPILOG (help), `add_arguments`, and `run`, which returns the exit status.
"""
