"""Print the dependencies of pyproject.toml, one a line, with those of the extras named as arguments.

Images install them in a layer of their own, before the code, which changes more often.
"""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
for line in project["dependencies"] + [line for name in sys.argv[1:] for line in extras[name]]:
    print(line)
