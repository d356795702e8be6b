"""A process that writes trials to databases when told to, one command a line; see `Writer`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from store_samples import PROBLEM, run, trial

from autoflash.store import Store
from autoflash.store.opening import transaction
from autoflash.store.writing import add_trial

ROOT = Path(__file__).parents[2]


class Writer:
    """A child process of this file; `tell` it what to do, then `heard` is what came of it."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command, path, **fields):
        self.process.stdin.write(json.dumps([command, str(path), fields]) + "\n")
        self.process.stdin.flush()

    def heard(self):
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.kill()
        self.process.communicate()


def problems(own, count):
    """Half are the same for every writer, half this one's own."""
    shared = [replace(PROBLEM, batch=1 + place) for place in range(count // 2)]
    mine = [replace(PROBLEM, seqlen_k=1 + own, batch=1 + n) for n in range(count - len(shared))]
    return shared + mine


def write(path, own, count):
    """Opens the database and writes `count` trials; writer 0 has the best time for each problem."""
    with Store.open(Path(path)) as store:
        started = run(store)
        for problem in problems(own, count):
            store.record_trial(started, trial(problem, us=10.0 + own))
    print("done", flush=True)


def hold(path):
    """Stops in the midst of a transaction, for ever."""
    with Store.open(Path(path)) as store:
        started = run(store)
        with transaction(store.conn):
            add_trial(store.conn, started, trial(us=1.0))
            print("inside", flush=True)
            sys.stdin.readline()


def main():
    for line in sys.stdin:
        command, path, fields = json.loads(line)
        try:
            {"write": write, "hold": hold}[command](path, **fields)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
