"""How an image lies in tiles: of a map that sees parts of a large image, and of the images of one case."""


def grid_of(tiles: int) -> tuple[int, int]:
    """(rows, columns) of so many tiles: as square as their number allows, with no more rows than columns.

    >>> grid_of(6), grid_of(4), grid_of(3)
    ((2, 3), (2, 2), (1, 3))
    """
    rows = next(rows for rows in range(int(tiles**0.5), 0, -1) if tiles % rows == 0)
    return rows, tiles // rows


def places(length: int, parts: int) -> tuple[int, list[int]]:
    """(length of a part, first pixel of each): equal parts that cover a side, and overlap where they must.

    >>> places(10, 2), places(10, 3)
    ((5, [0, 5]), (4, [0, 3, 6]))
    """
    part = -(-length // parts)
    return part, [index * (length - part) // max(1, parts - 1) for index in range(parts)]
