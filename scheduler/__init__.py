"""Which processes run, and where: the journal's demand in, trainers and samplers out.

`observe -> decide -> apply`: `demand` reads the journal, `decide` is pure, `clusters` make it so.
`reconcile` is the task that the beat of `python -m openrl.scheduler` sends every second. On one machine
`supervisor` is the only parent of processes and `up` puts a whole service together. Nothing here knows
how a model is trained, and nothing here imports torch.
"""
