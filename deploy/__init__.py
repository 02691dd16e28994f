"""Putting a federation on real machines: certificates, keys, bundles, the approved app, the two long-lived
processes."""
