"""Idioms of PyTorch training loops, each run under plain torch and under every form of zerostd.

forms.py       the forms: options of `zerostd.prepare`, and how exactly a result must agree
loop.py        `Loop`, which hands an idiom its model, its data and its place to prepare; `@idiom`
networks.py    the small models
halved.py      plain torch with bf16 parameters and fp32 masters, by hand
running.py     one idiom in one form: same, refused, different or error
peers.py       the same idioms under other libraries; peers.json keeps what they answer
table.py       expected.json, and the table in Markdown
edits.py ...   the idioms, a file for each theme
"""
