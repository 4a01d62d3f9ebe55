"""The queue's contract: what an operation is, its order, its owner, its promise, its record.

Here: settings and names (`settings`, `keys`), the store and its files (`store`, `spool`), the journal
that decides what runs and when (`journal`, `samples`, `ownership`, `*.lua`), promises (`futures`), who
and what exists (`registry`, `tenants`), the messages and their bytes (`messages`, `wire`), and Celery,
which rings the doorbell and shows the work. Not here: HTTP, torch, and any decision about which
operations share a batch. `openrl.tasks.celery` is the app for `celery -A openrl.tasks`.
"""
