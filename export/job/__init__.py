"""State of one export: its options (recipe), its plan, and the files that it writes."""
