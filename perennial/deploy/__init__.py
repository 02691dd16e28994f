"""Puts a federation on real machines: certificates, keys, bundles, the approved app, processes."""
