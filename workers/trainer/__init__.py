"""The trainer: LoRA runs of one base model in one process, many runs in one pass.

Policy (`passes`) is pure Python. The arithmetic (`batch`, `losses`, `optimizer`) is pure torch. `runs` holds
what is resident, `device` carries out a list of operations of several runs, `checkpoints` and
`recovery` write and read whole states, `engine` connects it all to the journal. What an operation looks
like on the wire and who may submit it is none of this package's business.
"""
