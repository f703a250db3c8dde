"""What a process holds, by kind, and limits that make a device of this machine."""
