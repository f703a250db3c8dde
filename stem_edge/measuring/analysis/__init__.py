"""The STEM paper's cost model, and the geometry of rows."""
