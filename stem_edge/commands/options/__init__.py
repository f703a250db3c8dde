"""Options that several commands share, and how commands read and print text."""
