"""One of the processes that `preloaded.spawn` starts: it calls the function in a file of the test's with its number."""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    function, args = pickle.loads(Path(sys.argv[1]).read_bytes())
    function(int(sys.argv[2]), *args)
