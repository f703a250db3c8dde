"""The ggml engine: its loader, the graphs and slots of its backbone, the trial of the library."""
