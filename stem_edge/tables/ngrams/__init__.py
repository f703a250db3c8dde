"""N-gram tables, in which a hash of several consecutive tokens selects a row."""
