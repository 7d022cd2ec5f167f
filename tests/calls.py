"""What a computation costs, in calls of functions: the same on a slow machine and on a busy one,
where seconds are not."""
from cProfile import Profile


def calls_of(computation) -> int:
    "How many functions `computation()` calls, those of C among them."
    profile = Profile()
    profile.runcall(computation)
    return sum(entry.callcount for entry in profile.getstats())
