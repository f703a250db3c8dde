"""The paper's cost model, and where rows point."""
