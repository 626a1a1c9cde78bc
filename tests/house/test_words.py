"""One word for one thing: the synonyms that the library does without, in code, messages, documents and templates."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from house.limits import MOST_GIVEN_UP_WORDS, MOST_VAGUE_NAMES
from house.sources import PACKAGE, ROOT, SOURCES, Source, hold, hold_everywhere

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
# Words of ours that were given up; like those above, once MOST_GIVEN_UP_WORDS is 0.
GIVEN_UP: dict[str, str] = {
    "shelf": "state shard",
    "shelve": "state shard",
    "keeper": "host gradient",
    "mirror": "host copy of a gradient",
    "road": "resources",
    "ground": "resources",
    "parcel": "saved storage",
    "bundle": "activations of a group",
    "carrier": "offloader",
    "door": "the noun of what stands there",
    "twin": "copy",
    "settle": "wait, commit, finish or flush",
    "settling": "wait, commit, finish or flush",
}
PHRASES: dict[str, str] = {"on trial": "speculative", "on_trial": "speculative"}  # given up too
# What a docstring of a function does not begin with.
NO_VERBS = re.compile(
    "(A|After|All|An|As|At|Backward|Bytes|For|From|Functions|Groups|How|If|In|It|Its|New|Nothing|Of|On|Seconds|Stage|"
    "That|The|There|This|Those|What|When|Where|Whether|Which|Whoever|Whole|With|[^A-Z].*)"
)
VAGUE = {"found", "one", "told"}  # as names of variables: say the noun

# Exact texts that may stand: names of torch's, of Python's and of others' own. One that is not there any more fails.
ALLOWED: dict[str, str] = {
    "ddp_bucket_cap_mb": "an option of Accelerate's",
    "torch.utils.swap_tensors": "torch's own",
    "Cannot swap t1": "an error of torch's",
    "allgather_partitions": "an option of DeepSpeed's",
    "allgather_bucket_size": "an option of DeepSpeed's",
    "reduce_bucket_size": "an option of DeepSpeed's",
    "stage3_prefetch_bucket_size": "an option of DeepSpeed's",
    "partition_activations": "an option of DeepSpeed's",
    "zero_hpz_partition_size": "an option of DeepSpeed's",
    "model.unshard()": "a call of FSDP2's",
    "ChunkStorageMetadata": "torch.distributed.checkpoint's own",
    "__create_chunk_list__": "torch.distributed.checkpoint's own",
    "chunk=": "an argument of torch.distributed.checkpoint's",
    "--ground": "a colour of the report page",
    "--warn-ground": "a colour of the report page",
}
# Documents where the words of others are explained, or the history is told.
SPEAKS_FREELY: dict[str, str] = {
    "docs/design.md": "lists the words that are not used",
    "docs/log.md": "tells what was tried, in the words of its time",
    "CONTRIBUTING.md": "lists the words that are not used",
}

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of snake_case, CamelCase and prose alike
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted(path for path in (PACKAGE / "reporting" / "templates").rglob("*") if path.is_file()),
]


def test_no_synonyms() -> None:
    hold_everywhere(lambda source: words(source.text, source.path, INSTEAD))


def test_no_synonyms_in_documents() -> None:
    assert len(DOCUMENTS) > 20
    hold(finding for path in _strict_documents() for finding in words(path.read_text(), path, INSTEAD))


def test_words_that_were_given_up_are_gone() -> None:
    def given_up(source: Source) -> Iterator[str]:
        yield from words(source.text, source.path, GIVEN_UP)
        yield from phrases(source.text, source.path)

    hold_everywhere(given_up, MOST_GIVEN_UP_WORDS)


def test_words_that_were_given_up_are_gone_from_documents() -> None:
    hold(finding for path in _strict_documents() for finding in words(path.read_text(), path, GIVEN_UP))
    hold(finding for path in _strict_documents() for finding in phrases(path.read_text(), path))


def test_variables_are_named_by_nouns() -> None:
    def vague(source: Source) -> Iterator[str]:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.NAME and token.string in VAGUE:
                yield f"{source.at(token.start[0])}: {token.string}"

    hold_everywhere(vague, MOST_VAGUE_NAMES)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """Properties are named by what they are; all other functions say what they do."""

    def without_verb(source: Source) -> Iterator[str]:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef) or any("property" in ast.unparse(d) for d in node.decorator_list):
                continue
            first = (ast.get_docstring(node) or "Do").split()[0]
            if NO_VERBS.fullmatch(first):
                yield f"{source.at(node.lineno)}: {node.name}: {first}"

    hold(finding for source in SOURCES for finding in without_verb(source))


def test_allowed_words_are_needed() -> None:
    texts = [source.text for source in SOURCES] + [path.read_text() for path in DOCUMENTS]
    hold(f"{allowed} is not there any more" for allowed in ALLOWED if not any(allowed in text for text in texts))
    names = {_name(path) for path in DOCUMENTS}
    hold(f"{name} is not there any more" for name in SPEAKS_FREELY if name not in names)


def words(text: str, path: Path, instead: dict[str, str]) -> Iterator[str]:
    """The words of a text that have another to be said instead."""
    stems = re.compile("|".join(instead))
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    for number, line in enumerate(text.splitlines(), start=1):
        for word in WORDS.findall(line):
            if stem := stems.match(word.lower()):
                yield f'{_name(path)}:{number}: "{word}"; say {instead[stem.group()]}'


def phrases(text: str, path: Path) -> Iterator[str]:
    """Phrases that were given up."""
    for number, line in enumerate(text.splitlines(), start=1):
        for phrase, instead in PHRASES.items():
            if phrase in line:
                yield f'{_name(path)}:{number}: "{phrase}"; say {instead}'


def _strict_documents() -> list[Path]:
    return [path for path in DOCUMENTS if _name(path) not in SPEAKS_FREELY]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
