"""A long chat over a streaming server: every turn sends the whole chat, as `transformers chat` does.

Start a server first (docs/serving.md), then: `python chat.py --model MODEL --text book.txt`. The
first message holds so much of the text, later ones ask about it. It prints each answer as it arrives, and the time
to its first token.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

QUESTIONS = (
    "Read this text.\n\n{text}\n\nWho tells the story?",
    "Which animals were named?",
    "Write one sentence about the sea.",
)


def ask(server: str, model: str, messages: list[dict[str, str]], n_tokens: int) -> str:
    """Send a chat, print the answer while it arrives, and return it."""
    body = {"model": model, "messages": messages, "max_tokens": n_tokens, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    url, data = f"{server}/v1/chat/completions", json.dumps(body).encode()
    begin, first, answer, count = time.perf_counter(), 0.0, "", 0
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=3600) as response:
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                text = choice["delta"].get("content") or ""
                first = first or (time.perf_counter() if text else 0.0)
                count += bool(text)
                answer += text
                print(text, end="", flush=True)
    seconds = time.perf_counter() - first
    print(f"\n[first after {first - begin:.2f} s, then {count / seconds:.1f} parts/s]\n")
    return answer


def main() -> None:
    """Hold the chat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="name or folder, as given to the server")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=12000)
    parser.add_argument("--answer", type=int, default=40, help="tokens of each answer")
    given = parser.parse_args()
    text = given.text.read_text(encoding="utf-8", errors="replace")[: given.characters]
    messages = list[dict[str, str]]()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question.format(text=text)})
        print(f"> {question[:60]!r}")
        messages.append({"role": "assistant", "content": ask(given.server, given.model, messages, given.answer)})


if __name__ == "__main__":
    try:
        main()
    except urllib.error.URLError as error:
        raise SystemExit(f"--server must be a server that runs, see docs/serving.md: {error}") from error
