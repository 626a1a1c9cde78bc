"""One word for one thing: the synonyms that the library does without, in names, comments, docstrings and messages."""

from __future__ import annotations

import re

from house.sources import SOURCES, Source, each_source

# stem: the word to use instead. "prefetch" is a word of its own.
INSTEAD: dict[str, str] = {
    "partition": "shard",
    "chunk": "shard, slice or block",
    "bucket": "group",
    "swap": "transfer, or replace",
    "fetch": "gather, or read",
    "materialis": "gather, or allocate",
    "materializ": "gather, or allocate",
    "unshard": "gather",
}

# Exact texts that may stand: names of torch's, of Python's and of others' own. One that is not there any more fails.
ALLOWED: set[str] = {"ddp_bucket_cap_mb", "torch.utils.swap_tensors"}

STEMS = re.compile("|".join(INSTEAD))
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of snake_case, CamelCase and prose alike


@each_source
def test_no_synonyms(source: Source) -> None:
    text = source.text
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    found = [
        f'{source.at(number)}: "{word}"; say {INSTEAD[stem.group()]}'
        for number, line in enumerate(text.splitlines(), start=1)
        for word in WORDS.findall(line)
        if (stem := STEMS.match(word.lower()))
    ]
    assert not found, "\n".join(found)


def test_allowed_words_are_needed() -> None:
    unused = {allowed for allowed in ALLOWED if not any(allowed in source.text for source in SOURCES)}
    assert not unused, f"not there any more: {sorted(unused)}"
