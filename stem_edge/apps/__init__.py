"""What is made of both halves: serving, batches, edits, measurements. Commands and users import it."""
