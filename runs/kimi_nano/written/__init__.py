"""Training problems made of sentences that people wrote, read from public data sets: python -m runs.kimi_nano.written

One module per kind of problem has `read(root)`, the records that it finds below a directory of cloned repositories, and
`problem(record, rng, tables)`, a training problem made of one. The data sets are no part of this project.
"""
