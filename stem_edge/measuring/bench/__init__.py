"""One run of a bundle (measure), or rounds of several subjects in turn (bench): figures, plots."""
