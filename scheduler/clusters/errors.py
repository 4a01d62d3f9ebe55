"""What a cluster may fail with, whichever it is."""


class ClusterUnavailable(Exception):
    """The cluster didn't answer, or didn't do it: the next pass of the scheduler looks again."""
