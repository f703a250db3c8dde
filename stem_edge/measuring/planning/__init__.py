"""Expectations of a bundle on a device, memory and speed, before it runs there."""
