"""HTTP in, operations out: the Tinker API that researchers' scripts speak.

Here: Flask, its settings, who is asking (`auth`), what a body says (`wire`, `checks`), one blueprint a
noun, long polls (`futures`), and the one table from errors to statuses (`errors`). Not here: state (all
of it is in the store, behind `openrl.tasks`) and torch (this package never imports it).
"""
