"""The generation loop: Loop computes one request, Scheduler computes several together."""
