"""Knowledge edits (tokens use the table rows of other tokens): file format, alignment schemes."""
