"""Time and memory of one subject, phase by phase, beside what was expected: the command measure."""
