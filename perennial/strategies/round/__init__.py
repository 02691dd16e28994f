"""One round between server and sites: requests, replies, the gate, and what a strategy may ask."""
