"""What an attacker or a typo sends to a controller: refused in a sentence, and nobody is hurt."""

import argparse
import asyncio
import gzip
import itertools
import json

import pytest
from exec.pretended import file_of, refuses
from exec.served import served

from synergy_exec.commands._asking import Client, list_jobs
from synergy_exec.job_file import MOST_BYTES, MOST_NAME, MOST_SAMPLES, MOST_WORK, read_job_file

GOOD = file_of(work=10.0).values()
LARGEST = {"name": "ß" * MOST_NAME, "max_batch": MOST_SAMPLES, "work": MOST_WORK, "arguments": {"a": "ü" * 10_000}}
ESCAPES = "\x1b]0;owned\x07\x1b[2J"
TOKEN = b"Authorization: Bearer TOKEN"
"""The controller's own is sent in the place of the last word."""


def request(method, path, body=b"", *headers, token=TOKEN):
    """The bytes that are sent. body: bytes, or what is sent as JSON. headers: added; a length replaces the true one."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: x", b"Connection: close", token, *headers]
    if not any(each.startswith(b"Content-Length") for each in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(each for each in lines if each) + b"\r\n\r\n" + body


def post(body, *headers):
    return request("POST", "/jobs", body, *headers)


def job(**more):
    return 400, post({**GOOD, **more})


def raw(key, value):
    """The good job with this text where the key's value stands."""
    return 400, post(json.dumps({**GOOD, key: "@"}).encode().replace(b'"@"', value))


def nested(levels):
    return b'{"a":' * levels + b"1" + b"}" * levels


REFUSED = {
    "nothing": (400, post(b"")),
    "not JSON": (400, post(b"{not json")),
    "null": (400, post(None)),
    "deep JSON": (400, post(nested(15_000))),
    "deep arguments": raw("arguments", nested(200)),
    "a charset that is none": (400, post(b"{}", b"Content-Type: application/json; charset=bogus")),
    "a gzip bomb": (413, post(gzip.compress(b"x" * 50_000_000), b"Content-Encoding: gzip")),
    "over the limit": (413, post(b"x" * (MOST_BYTES + 1))),
    "an endless length": (413, post(b"{}", b"Content-Length: 99999999999999999")),
    "a negative length": (400, post(b"{}", b"Content-Length: -1")),
    "a key of 10 kB": job(**{"k" * 10_000: 3}),
    "work is a text": job(work="10"),
    "work is NaN": raw("work", b"NaN"),
    "work is endless": raw("work", b"1e999"),
    "work of 1e300": job(work=1e300),
    "more slots than there are": job(slots=9),
    "a user with escape codes": job(user=ESCAPES),
    "a priority that nobody looks at": job(priority=5),
    "a class that is none": job(**{"class": "rm -rf /"}),
    "a class with a null byte": job(**{"class": "/a\0b.py:C"}),
    "a name of deep lists": raw("name", b"[" * 900 + b"]" * 900),
    "a name with a new line": job(name="a\nb"),
    "a name with escape codes": job(name=ESCAPES),
    "a name with a null byte": job(name="a\0b"),
    "a name with a surrogate": job(name="a\ud800b"),
    "a name that turns around": job(name="a\u202eb"),
    "a name that cannot be seen": job(name="a\u200bb"),
    "a name of 10 kB": job(name="x" * 10_000),
    "a name that is a mapping": job(name={"a": 1}),
    "an unknown job": (404, request("DELETE", "/jobs/mime")),
    "a negative number": (404, request("DELETE", "/jobs/-1")),
    "a null byte": (404, request("DELETE", "/jobs/%00")),
    "a way out": (404, request("GET", "/jobs/..%2f..%2ftoken/explain")),
    "a path to the token": (404, request("GET", "/../token")),
    "a new line in the path": (404, request("DELETE", "/jobs/a%0d%0aSet-Cookie:%20x")),
    "an unknown path": (404, request("GET", "/nowhere")),
    "a method that is not offered": (405, request("PUT", "/jobs")),
    "a method nobody knows": (400, request("BREW", "/jobs")),
    "an agent without a websocket": (400, request("GET", "/agents")),
    "an expectation": (417, post(b"{}", b"Expect: more")),
    "a number of jobs that is none": (400, request("GET", "/state?most=-1")),
    "an unknown job, again": (404, request("POST", "/jobs/mime/retry", {})),
    "again, with no JSON": (400, request("POST", "/jobs/mime/retry", b"{")),
    "again, with another key": (400, request("POST", "/jobs/mime/retry", {"from": 3})),
    "an unknown job's weights": (404, request("GET", "/jobs/mime/weights")),
    "no token": (401, request("GET", "/jobs", token=b"")),
    "a wrong token": (401, request("GET", "/jobs", token=b"Authorization: Bearer guess")),
    "a token of 7 kB": (401, request("GET", "/jobs", token=b"Authorization: Bearer " + b"x" * 7_000)),
    "no token, to an unknown path": (401, request("GET", "/nowhere", token=b"")),
    "no token, over the limit": (401, request("POST", "/jobs", b"x" * (MOST_BYTES + 1), token=b"")),
    "the token in the query": (401, request("GET", "/jobs?token=TOKEN", token=b"")),
}


async def answer(client, sent):
    """The status, the headers and the text of the answer."""
    host, _, port = client.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent.replace(b"TOKEN", client.token.encode()))
    try:
        head, _, body = (await asyncio.wait_for(reader.read(), 15.0)).decode().partition("\r\n\r\n")
    finally:
        writer.close()
    return int(head.split()[1]), head, body


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """One controller is sent all of it, and decides on a good job at the end."""
    found = {}

    async def work(controller, client):
        for label, (_, sent) in REFUSED.items():
            found[label] = await answer(client, sent)
        found["the largest job"] = await answer(client, post({**GOOD, **LARGEST}))
        found["a good job"] = await answer(client, post(GOOD))
        controller.execution.decide(controller.now_s())
        found["the list"] = await answer(client, request("GET", "/jobs"))

    served(tmp_path_factory.mktemp("served"), work, 2)
    return found


@pytest.mark.parametrize("label", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(answers, label):
    status, headers, text = answers[label]
    assert status == REFUSED[label][0], text
    if "application/json" in headers:
        sentence = json.loads(text)["error"]
        assert 10 < len(sentence) < 500
        assert sentence.isprintable()
    else:
        assert status in (400, 417)
        assert len(text) < 1_000


def test_good_jobs_alone_are_taken(answers):
    assert answers["a good job"][0] == answers["the largest job"][0] == 201
    largest, good = json.loads(answers["the list"][2])
    assert (largest["name"], good["name"]) == (LARGEST["name"], GOOD["name"])
    assert largest["slots"] + good["slots"] == 2


def test_what_users_write_moves_no_cursor(monkeypatch, capsys):
    """A failed job's reason is what its code raised, and a trace's names are what its log says."""
    texts = {"name": f"n{ESCAPES}", "note": "", "reason": f"rank 0: ValueError: {ESCAPES}\nline 2\rjob 7 done"}
    numbers = dict.fromkeys(("job", "slots", "slots_asked", "step", "work", "restarts", "submitted_unix_s"), 0)
    unknown = dict.fromkeys(("plan", "compressor", "batch", "loss", "goodput", "started_unix_s"))
    row = {**texts, **numbers, **unknown, "state": "failed", "work_total": 1.0}
    answers = {"/jobs": [row], "/state?most=0": {"aside": [f"node 0 is not used, {ESCAPES}"]}}
    monkeypatch.setattr(Client, "ask", lambda self, method, path: answers[path])
    list_jobs(argparse.Namespace(json=False), Client("http://nowhere", ""))
    said = capsys.readouterr().out
    assert all(each.isprintable() for each in said.split("\n"))
    assert r"rank 0: ValueError: \x1b]0;owned\x07\x1b[2J" in said
    assert "node 0 is not used" in said


TEN_EACH = [f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]" for before, name in itertools.pairwise("abcdef")]
BILLION = f"{{a: &a [x,x,x,x,x,x,x,x,x,x], {', '.join(TEN_EACH)}}}"
"""A YAML document that expands to very many items: each list repeats the list before ten times."""


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("&a [*a]", "at most 20 levels"),
        (BILLION, "no endless ones"),
        ("{day: 2024-01-01}", "is a date; expected texts"),
        ("{width: " + "9" * 5_000 + "}", "not YAML"),
        ("[" * 1_000, "not YAML"),
    ],
    ids=["a list in itself", "lists of lists of lists", "a date", "5000 digits", "deep"],
)  # fmt: skip
def test_a_job_file_that_cannot_be_sent_is_refused_before(tmp_path, written, says):
    path = tmp_path / "job.yaml"
    path.write_text(f"class: a:B\ninitial_batch: 1\nwork: 1\narguments: {{x: {written}}}\n")
    refuses(says, read_job_file, path)
