"""Why a site is not let in: reasons and their remedies, the same at the operator's port and at the site."""

UNREGISTERED = (
    "this site's key is not registered at the SuperLink; send the operator its .pub file, for `perennial "
    "deploy add-site` and `perennial deploy register`"
)
REVOKED = (
    "the operator has revoked this site's key, which cannot be registered again; to come back, make a new "
    "one with `perennial site keygen` and send the operator its .pub file"
)
CONNECTED = (
    "another SuperNode is connected with this key: either this site's own, which ended less than two minutes "
    "ago (wait so long), or one on another machine (stop it; each site needs a key of its own). If you know "
    "of none, the key was copied: ask the operator to revoke it"
)
CLOCK = "this machine's clock and the SuperLink's differ; set the clock"
REASONS = (UNREGISTERED, REVOKED, CONNECTED)
