"""The command stem-edge: a file for each subcommand, which parses arguments and prints results.

The work itself is done by functions of the package that Python users call, too.
"""
