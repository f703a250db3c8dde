"""Numbers about bundles: what they cost, take and lose."""
