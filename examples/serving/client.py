"""A client of an OpenAI-compatible server: long prompts, several at once, streamed answers.

Start a server first (docs/serving.md), then: `python client.py --text book.txt --tokens 8000 --requests 4`.
It prints the time to the first token and the rate of answers, and with `--loss` the mean loss of the second half
of each prompt. Run it against the same server with and without prescore to compare. `--out` adds a line of JSON
for every request to a file.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def post(url: str, body: dict[str, Any]) -> Any:
    """An open response."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=3600)


def stream(server: str, body: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first token, tokens per second after it, and the answer."""
    begin, times, text = time.perf_counter(), list[float](), ""
    with post(f"{server}/v1/completions", {**body, "stream": True}) as response:
        for line in response:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                choices = json.loads(line[6:])["choices"]
                if choices:
                    times.append(time.perf_counter())
                    text += choices[0]["text"]
    rate = (len(times) - 1) / max(1e-9, times[-1] - times[0])
    return {"first_token_seconds": round(times[0] - begin, 3), "tokens_per_second": round(rate, 2), "answer": text}


def prompt_loss(server: str, body: dict[str, Any]) -> float:
    """Mean loss of the second half of a prompt (`prompt_logprobs` of vLLM)."""
    with post(f"{server}/v1/completions", {**body, "max_tokens": 1, "prompt_logprobs": 0}) as response:
        entries = json.load(response)["choices"][0]["prompt_logprobs"][1:]
    logs = [next(iter(entry.values()))["logprob"] for entry in entries]
    half = logs[len(logs) // 2 :]
    return -sum(half) / len(half)


def main() -> None:
    """Send the requests and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--text", type=Path, required=True, help="a text file; each request takes another part")
    parser.add_argument("--begin", type=float, default=0.0, help="share of the text to skip, 0 to 1")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8000], help="lengths of prompts, used in turn")
    parser.add_argument("--requests", type=int, default=1, help="how many at once")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--loss", action="store_true", help="the loss of the prompts instead of times")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add the results to")
    parser.add_argument("--label", default="", help="what the server runs, for that file")
    given = parser.parse_args()
    with urllib.request.urlopen(f"{given.server}/v1/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    text = given.text.read_text(encoding="utf-8", errors="replace")
    text = text[int(given.begin * len(text)) :]
    with post(f"{given.server}/tokenize", {"model": model, "prompt": text}) as response:
        tokens = json.load(response)["tokens"]
    bodies, start = [], 0
    for number in range(given.requests):
        length = given.tokens[number % len(given.tokens)]
        prompt = tokens[start : start + length]
        bodies.append({"model": model, "prompt": prompt, "max_tokens": given.answer, "temperature": 0})
        start += length
    if given.loss:
        results = [{"loss": prompt_loss(given.server, body)} for body in bodies]
    else:
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(bodies)) as pool:
            results = list(pool.map(lambda body: stream(given.server, body | {"ignore_eos": True}), bodies))
        seconds = time.perf_counter() - begin
        results = [each | {"batch_seconds": round(seconds, 3)} for each in results]
        total = sum(len(body["prompt"]) + given.answer for body in bodies)
        print(f"{len(bodies)} requests: {seconds:.2f} s, {total / seconds:.0f} tokens/s with those of the prompts")
    for number, (body, result) in enumerate(zip(bodies, results, strict=True)):
        shown = {"request": number, "tokens": len(body["prompt"]), **result}
        print(shown)
        if given.out:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"label": given.label, "requests": len(bodies), **shown}) + "\n")


if __name__ == "__main__":
    try:
        main()
    except urllib.error.URLError as error:
        raise SystemExit(f"--server must be a server that runs, see docs/serving.md: {error}") from error
