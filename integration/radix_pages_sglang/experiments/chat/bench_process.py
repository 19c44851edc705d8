"""Runs SGLang's bench_serving again and again in one process: importing it takes ten seconds, a burst little more.

Each line of standard input is a JSON list of its command-line arguments. Standard output gets one JSON line when it
is imported and one for each run: null, or why the run failed. What bench_serving prints goes to standard error.
"""

import json
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from sglang.benchmark import serving

    def answer(error: str | None) -> None:
        print(json.dumps(error), file=answers, flush=True)

    answer(None)
    for line in sys.stdin:
        sys.argv = ["bench_serving", *json.loads(line)]
        try:
            serving.cli_main()
        except SystemExit as end:
            answer(None if not end.code else f"it ended with status {end.code}")
        except Exception as error:  # whatever a burst dies of is told to the parent; the next one is tried
            traceback.print_exc()
            answer(f"{type(error).__name__}: {error}")
        else:
            answer(None)


if __name__ == "__main__":
    main()
