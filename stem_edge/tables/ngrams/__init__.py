"""N-gram tables, in which several tokens select a row: which row it is, and its place on flash."""
