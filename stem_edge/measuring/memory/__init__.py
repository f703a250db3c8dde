"""Memory of a process by kind, and limits that let this machine stand in for a smaller device."""
