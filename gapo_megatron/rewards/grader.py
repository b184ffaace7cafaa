"""math-verify in a process of its own, with a time limit that holds.

A response can hold an expression whose value takes hours (9**9**9**9). math-verify stops itself with SIGALRM, which a thread
cannot use (OpenRLHF calls a reward function in threads), and which does not interrupt one long integer operation. Here the
kernel ends the process instead, and the next request starts another one.
"""

import json
import os
import signal
import subprocess
import sys
import threading

SECONDS = 5


class Grader:
    """Grades in a child process, one request at a time; any thread may call."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None

    def equal(self, answer: str, label: str) -> bool:
        """Whether math-verify finds the final answer in `answer` and in `label`, and finds them equal.

        False when that takes longer than the time limit.

        Raises:
            ValueError: `label` holds no mathematical expression.
        """
        with self._lock:
            reply = self._ask(json.dumps([answer, label]))
        if reply == "no label":
            raise ValueError(f"the label {label!r} holds no number or LaTeX expression; give the expected answer")
        return reply == "equal"

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._stop()

    def _ask(self, request: str) -> str:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "gapo_megatron.rewards.grader", str(self._seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._child.stdin and self._child.stdout
        try:
            self._child.stdin.write(request + "\n")
            self._child.stdin.flush()
            reply = self._child.stdout.readline().strip()
        except BrokenPipeError:
            reply = ""
        if not reply:
            code = self._stop()
            if code != -signal.SIGALRM:
                raise RuntimeError(f"the grading process ended with exit code {code}; its error is above")
        return reply

    def _stop(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        assert child.stdin and child.stdout
        child.stdin.close()
        child.stdout.close()
        return child.wait()


def serve(seconds: int) -> None:
    """The child: a JSON line [answer, label] in, one word out, until stdin closes."""
    from math_verify import parse, verify

    def compare(answer: str, label: str) -> str:
        gold = parse(label, parsing_timeout=0)
        if not gold:
            return "no label"
        return "equal" if verify(gold, parse(answer, parsing_timeout=0), timeout_seconds=0) else "different"

    replies, sys.stdout = sys.stdout, sys.stderr  # whatever libraries print must not look like a reply
    for line in sys.stdin:
        signal.alarm(seconds)  # no handler: the kernel ends the process
        word = compare(*json.loads(line))
        signal.alarm(0)
        print(word, file=replies, flush=True)


if __name__ == "__main__":
    import logging

    logging.disable(logging.WARNING)  # math-verify's remark that its own limit is off
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent, whose end closes stdin
    os.nice(1)
    serve(int(sys.argv[1]))
