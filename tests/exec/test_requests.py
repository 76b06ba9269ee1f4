"""What an attacker or a typo sends to a controller: refused in a sentence, and nobody is hurt."""

import argparse
import asyncio
import gzip
import json
from typing import NamedTuple

import pytest
from exec.pretended import file_of, refuses
from exec.served import served

from synergy_exec.commands._asking import Client, list_jobs
from synergy_exec.job_file import MOST_BYTES, MOST_NAME, MOST_SAMPLES, MOST_WORK, read_job_file

GOOD = file_of(work=10.0).values()
PATIENCE_S = 15.0
LARGEST = {"name": "ß" * MOST_NAME, "max_batch": MOST_SAMPLES, "work": MOST_WORK, "arguments": {"a": "ü" * 10_000}}
ESCAPES = "\x1b]0;owned\x07\x1b[2J"


class Sent(NamedTuple):
    """A request. body: bytes, or what is sent as JSON. more: header lines. token: None for the right one."""

    status: int
    method: str = "GET"
    path: str = "/jobs"
    body: object = b""
    more: tuple[bytes, ...] = ()
    token: bytes | None = None

    def raw(self, token):
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        given = b"Bearer " + token.encode() if self.token is None else self.token
        lines = [f"{self.method} {self.path} HTTP/1.1".encode(), b"Host: x", b"Connection: close"]
        lines += [b"Authorization: " + given] if given else []
        if not any(each.lower().startswith((b"transfer-encoding", b"content-length")) for each in self.more):
            lines.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join([*lines, *self.more]) + b"\r\n\r\n" + body


def post(body, status=400, *more):
    return Sent(status, "POST", "/jobs", body, more)


def job(**more):
    return post({**GOOD, **more})


def nested(levels):
    return b'{"a":' * levels + b"1" + b"}" * levels


def with_raw(key, value):
    """The good job with this text where the key's value stands."""
    return json.dumps({**GOOD, key: "@"}).encode().replace(b'"@"', value)


BODIES = {
    "nothing": post(b""),
    "not JSON": post(b"{not json"),
    "null": post(None),
    "deep JSON": post(nested(15_000)),
    "deep arguments": post(with_raw("arguments", nested(200))),
    "a charset that is none": post(b"{}", 400, b"Content-Type: application/json; charset=bogus"),
    "a gzip bomb": post(gzip.compress(b"x" * 50_000_000), 413, b"Content-Encoding: gzip"),
    "over the limit": post(b"x" * (MOST_BYTES + 1), 413),
    "an endless length": post(b"{}", 413, b"Content-Length: 99999999999999999"),
    "a negative length": post(b"{}", 400, b"Content-Length: -1"),
}
VALUES = {
    "a key of 10 kB": post({**GOOD, "k" * 10_000: 3}),
    "work is a text": job(work="10"),
    "work is NaN": post(with_raw("work", b"NaN")),
    "work is endless": post(with_raw("work", b"1e999")),
    "work of 1e300": job(work=1e300),
    "more slots than there are": job(slots=9),
    "a user with escape codes": job(user=ESCAPES),
    "a priority that nobody looks at": job(priority=5),
    "a class that is none": post({**GOOD, "class": "rm -rf /"}),
    "a class with a null byte": post({**GOOD, "class": "/a\0b.py:C"}),
    "a name of deep lists": post(with_raw("name", b"[" * 900 + b"]" * 900)),
}
NAMES = {
    f"the name {label}": job(name=name)
    for label, name in {
        "has a new line": "a\nb",
        "has escape codes": ESCAPES,
        "has a null byte": "a\0b",
        "has a surrogate": "a\ud800b",
        "turns around": "a\u202eb",
        "cannot be seen": "a\u200bb",
        "has 10 kB": "x" * 10_000,
        "is a mapping": {"a": 1},
    }.items()
}
PATHS = {
    "an unknown job": Sent(404, "DELETE", "/jobs/mime"),
    "a negative number": Sent(404, "DELETE", "/jobs/-1"),
    "a null byte": Sent(404, "DELETE", "/jobs/%00"),
    "a way out": Sent(404, "GET", "/jobs/..%2f..%2ftoken/explain"),
    "a path to the token": Sent(404, "GET", "/../token"),
    "a new line in the path": Sent(404, "DELETE", "/jobs/a%0d%0aSet-Cookie:%20x"),
    "an unknown path": Sent(404, "GET", "/nowhere"),
    "a method that is not offered": Sent(405, "PUT", "/jobs"),
    "a method nobody knows": Sent(400, "BREW", "/jobs"),
    "an agent without a websocket": Sent(400, "GET", "/agents"),
    "an expectation": Sent(417, "POST", "/jobs", b"{}", (b"Expect: more",)),
}
TOKENS = {
    "no token": Sent(401, token=b""),
    "a wrong token": Sent(401, token=b"Bearer guess"),
    "a token of 7 kB": Sent(401, token=b"Bearer " + b"x" * 7_000),
    "no token, to an unknown path": Sent(401, "GET", "/nowhere", token=b""),
    "no token, over the limit": Sent(401, "POST", "/jobs", b"x" * (MOST_BYTES + 1), token=b""),
    "a number of jobs that is none": Sent(400, "GET", "/state?most=-1"),
    "an unknown job, again": Sent(404, "POST", "/jobs/mime/retry", {}),
    "again, with no JSON": Sent(400, "POST", "/jobs/mime/retry", b"{"),
    "again, with another key": Sent(400, "POST", "/jobs/mime/retry", {"from": 3}),
    "an unknown job's weights": Sent(404, "GET", "/jobs/mime/weights"),
    "the token in the query": Sent(401, "GET", "/jobs?token=TOKEN", token=b""),
}
ALL = {**BODIES, **VALUES, **NAMES, **PATHS, **TOKENS}


class Answered(NamedTuple):
    status: int
    headers: str
    text: str


async def answer(client, sent):
    host, _, port = client.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent.raw(client.token).replace(b"TOKEN", client.token.encode()))
    try:
        raw = await asyncio.wait_for(reader.read(), PATIENCE_S)
    except TimeoutError:
        return Answered(0, "", "no answer")
    finally:
        writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return Answered(int(head.split()[1]), head.decode(), body.decode())


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """One controller is sent all of it, and decides on a good job at the end."""
    found = {}

    async def work(controller, client):
        for label, sent in ALL.items():
            found[label] = await answer(client, sent)
            for taken in list(controller.execution.decider.active.values()):
                found[label + ", and was taken"] = Answered(201, "", taken.name)
                controller.execution.cancel(taken, controller.now_s())
        found["the largest job"] = await answer(client, post({**GOOD, **LARGEST}, 201))
        found["a good job"] = await answer(client, post(GOOD, 201))
        controller.execution.decide(controller.now_s())
        found["the list"] = await answer(client, Sent(200))

    served(tmp_path_factory.mktemp("served"), work, 2)
    return found


@pytest.mark.parametrize("label", ALL)
def test_what_cannot_be_is_refused_in_a_sentence(answers, label):
    got = answers[label]
    assert got.status == ALL[label].status, got
    assert f"{label}, and was taken" not in answers
    if "application/json" in got.headers:
        sentence = json.loads(got.text)["error"]
        assert 10 < len(sentence) < 500
        assert sentence.isprintable()
    else:
        assert got.status in (400, 417)
        assert len(got.text) < 1_000


def test_a_good_job_is_taken_after_all_that(answers):
    assert answers["a good job"].status == 201
    *_, largest, listed = json.loads(answers["the list"].text)
    assert (largest["name"], listed["name"]) == (LARGEST["name"], GOOD["name"])
    assert largest["slots"] + listed["slots"] == 2


def test_what_users_write_moves_no_cursor(monkeypatch, capsys):
    """A failed job's reason is what its code raised, and a trace's names are what its log says."""
    texts = {"name": f"n{ESCAPES}", "note": "", "reason": f"rank 0: ValueError: {ESCAPES}\nline 2\rjob 7 done"}
    numbers = dict.fromkeys(("job", "slots", "slots_asked", "step", "work", "restarts"), 0)
    known = {"state": "failed", "plan": None, "compressor": None, "batch": None, "loss": None}
    known |= {"goodput": None, "work_total": 1.0}
    aside = {"aside": [f"node 0 is not used, {ESCAPES}"]}
    answers = {"/jobs": [{**texts, **numbers, **known}], "/state?most=0": aside}
    monkeypatch.setattr(Client, "ask", lambda self, method, path: answers[path])
    list_jobs(argparse.Namespace(json=False), Client("http://nowhere", ""))
    said = capsys.readouterr().out
    assert all(each.isprintable() for each in said.split("\n"))
    assert r"rank 0: ValueError: \x1b]0;owned\x07\x1b[2J" in said
    assert "node 0 is not used" in said


BILLION = "{a: &a [x,x,x,x,x,x,x,x,x,x]"
"""Of lists: each of the next has ten of those before."""
for before, name in ("ab", "bc", "cd", "de", "ef"):
    BILLION += f", {name}: &{name} [{','.join([f'*{before}'] * 10)}]"
BILLION += "}"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("&a [*a]", "at most 20 levels"),
        (BILLION, "no endless ones"),
        ("{day: 2024-01-01}", "is a date; expected texts"),
        ("{width: " + "9" * 5_000 + "}", "not YAML"),
        ("[" * 5_000, "not YAML"),
    ],
    ids=["a list in itself", "lists of lists of lists", "a date", "5000 digits", "deep"],
)  # fmt: skip
def test_a_job_file_that_cannot_be_sent_is_refused_before(tmp_path, written, says):
    path = tmp_path / "job.yaml"
    path.write_text(f"class: a:B\ninitial_batch: 1\nwork: 1\narguments: {{x: {written}}}\n")
    refuses(says, read_job_file, path)
