"""Memory and speed to expect of a bundle on a device, before it runs there."""
