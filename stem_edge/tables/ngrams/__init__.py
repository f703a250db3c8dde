"""N-gram tables, in which several consecutive tokens select a row: row numbers and storage."""
