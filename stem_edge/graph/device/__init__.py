"""Graphs for accelerators: the graphs that decode, in standard operators, over rows in device memory."""
