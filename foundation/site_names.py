"""What a site may be called. Its name is a folder of a run, a key at the server and a word in the journal."""

SITE_NAME = r"(?!\.\.?$)[^/\x00-\x1f\x7f]{1,100}"
"""The whole name must match it."""
ALLOWED = "1 to 100 characters without / and control characters, not . or .."
