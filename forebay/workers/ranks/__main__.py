"""`python -m forebay.workers.ranks STEPS MOVES`: one more rank of the worker that starts it, on two descriptors of its.

Not a command for people: `forebay worker --tensor-parallel-size N` starts as many as it needs.
"""

import os
import signal
import sys

from forebay.parent import follow_parent

follow_parent(signal.SIGKILL)  # before anything takes time: rank 0 may be dying already

from forebay.importing import nothing_collected  # noqa: E402

with nothing_collected():
    from forebay.workers.ranks.follower import run_follower

code = run_follower(int(sys.argv[1]), int(sys.argv[2]))
sys.stderr.flush()
os._exit(code)  # at once: libraries' threads have nothing to tidy up, and would get in each other's way
