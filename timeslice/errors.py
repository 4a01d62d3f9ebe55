"""What goes wrong with a turn: one class per remedy. None of them leaves the accelerator to somebody else."""


class TurnError(Exception):
    """The base of all of them."""


class NotGranted(TurnError):
    """Others had the accelerator for as long as the caller would wait: try again. It stands in no line now."""


class Refused(TurnError):
    """This token isn't the present turn's: the process must touch the accelerator no more, and leave."""


class Broken(TurnError):
    """Parking or restoring failed, now or earlier: the process must leave; its turn ends with its last process."""
