"""The ggml engine: its loader, the graphs and slots of its backbone, and the trial of the library."""
