"""Import paths of what moved to other rooms, for code that was written before: the same objects, no copies."""

import sys

from longstraw.data import text

sys.modules[f"{__name__}.text"] = text
