"""What a site may be called, wherever its name comes from: a hospital's file, a column of data, a message."""

SITE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""In site.yaml and in the operator's folder, where a person chooses the name."""
LONGEST = 64
SITE_NAME_RULE = (
    f"1 to {LONGEST} printable characters that begin with a letter or digit, without slash or backslash"
)


def is_site_name(name: str) -> bool:
    """Whether a name that data or a message gives can be shown, logged and used as a folder's name.

    Wider than SITE_NAME, because data that name their own sites know places like `Köln Süd`.
    """
    return (
        1 <= len(name) <= LONGEST
        and name.isprintable()
        and name[0].isalnum()
        and not {"/", "\\"}.intersection(name)
    )
