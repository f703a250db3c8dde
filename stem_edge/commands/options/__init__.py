"""Options that several commands have, and how they read and print texts."""
