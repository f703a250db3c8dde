"""Graphs for accelerators: those for decoding, in standard operators or with rows taken on the device."""
