"""`PYTHONPATH=src:tests python -m idioms`: run idioms by hand.

python -m idioms list                    names and texts
python -m idioms run NAME --form FORM    one idiom in one form of one rank, in this process, with the traceback
python -m idioms try [NAMES] [--form F]  outcomes, in processes of their own
python -m idioms accept [NAMES]          write cells that are new to expected.json
python -m idioms table                   the table in Markdown
python -m idioms peers [NAMES] [--peer P]  what other libraries answer, kept in peers.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from idioms.forms import BY_NAME, FORMS, PLAIN
from idioms.loop import idioms
from idioms.peers import PEERS, run_peers
from idioms.running import Outcome, Runner, judge, plain_result, run_idiom
from idioms.table import accept, counts, markdown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m idioms", description=__doc__)
    parser.add_argument("command", choices=["list", "run", "try", "accept", "table", "peers"])
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--form", action="append", choices=["plain", *BY_NAME], help="only this one; may be repeated")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="keep outcomes here, and take those that are there")
    arguments = parser.parse_args()
    names = [name for name in idioms() if not arguments.names or any(part in name for part in arguments.names)]
    forms = arguments.form or list(BY_NAME)
    if arguments.command == "list":
        for name in names:
            print(f"{idioms()[name].theme:18} {name:50} {idioms()[name].text}")
    elif arguments.command == "peers":
        run_peers(names, arguments.peer or list(PEERS))
    elif arguments.command == "run":
        run_here(names, forms)
    else:
        outcomes = run_all(names, forms, arguments.json, verbose=arguments.command != "table")
        print(markdown(outcomes) if arguments.command == "table" else counts(outcomes))
        if arguments.command == "accept":
            print("\n".join(["not accepted:", *lines] if (lines := accept(outcomes)) else []))


def run_here(names: list[str], forms: list[str]) -> None:
    """In this process, so that what is raised shows where."""
    torch.set_num_threads(1)
    for name in names:
        for form_name in forms:
            form = PLAIN if form_name == "plain" else BY_NAME[form_name]
            assert form.num_ranks == 1, f"{form_name} needs two processes: use `try`"
            result, _ = run_idiom(idioms()[name], form)
            print(name, form_name, judge(result, plain_result(name), idioms()[name], form))


def run_all(names: list[str], forms: list[str], path: Path | None, *, verbose: bool) -> dict[str, dict[str, Outcome]]:
    """In processes of their own; outcomes by idiom and form."""
    kept = json.loads(path.read_text()) if path is not None and path.exists() else {}
    outcomes = {name: {form: Outcome(**parts) for form, parts in cells.items()} for name, cells in kept.items()}
    with Runner() as runner:
        for name in names:
            if set(forms) <= outcomes.get(name, {}).keys():
                continue
            effect = runner.effect(name)
            if verbose:
                print(f"{name}: effect {effect if effect is None else format(effect, '.2g')}", flush=True)
            for form in [form for form in FORMS if form.name in forms]:
                begin = time.perf_counter()
                outcome = runner.outcome(name, form)
                outcomes.setdefault(name, {})[form.name] = outcome
                if verbose:
                    took = f"{time.perf_counter() - begin:5.2f} s"
                    print(f"  {form.name:10} {took} {outcome.outcome:10} {outcome.detail[:200]} | {outcome.source}")
            if path is not None:
                path.write_text(json.dumps({n: {f: asdict(o) for f, o in c.items()} for n, c in outcomes.items()}))
    return outcomes


if __name__ == "__main__":
    main()
