"""The standard graphs on an accelerator: their loader, slots, contexts and memory."""
