"""Parts of a page that programs write, between `<!-- NAME -->` and `<!-- end of NAME -->`."""

from collections.abc import Mapping


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """The page with the text of each block between its marks. Raises ValueError where marks are missing."""
    for name, text in blocks.items():
        before, start, rest = page.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        if not start or not end:
            raise ValueError(f"a page needs <!-- {name} --> and <!-- end of {name} -->")
        page = f"{before}{start}\n\n{text}\n{end}{after}"
    return page
