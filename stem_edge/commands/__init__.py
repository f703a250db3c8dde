"""The command stem-edge: a file for each subcommand, parsing and printing only.

What a command does is a function of the package that Python users call, too.
"""
