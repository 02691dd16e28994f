"""The examples of the pages on extending, as they stand there."""

import re

from tests.loopback import ROOT

PAGES = "".join((ROOT / "docs" / name).read_text() for name in ("extend.md", "extend_learning.md"))
CODE = re.findall(r"^```python\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
"""The settings of each example."""
MODULES = dict(zip(re.findall(r'"(my_\w+):\w+"', "".join(BLOCKS)), CODE, strict=True))
"""Code by the module's name that its settings use."""
