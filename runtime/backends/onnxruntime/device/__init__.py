"""Runs a backbone on an accelerator, by graphs in standard operators: loader, contexts and memory."""
