"""Runs a backbone on an accelerator, with graphs of standard operators: loader, contexts and memory."""
