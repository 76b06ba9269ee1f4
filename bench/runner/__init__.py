"""Runs declared experiments, keeps their results, and writes their tables into the pages of docs/.

`experiment` has what an experiment is made of, `dependencies` what its results depend on, `carry_out` runs tasks on all
cores, `blocks` replaces parts of a page, and `tables` turns numbers into Markdown.
"""
