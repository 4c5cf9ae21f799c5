"""One server: what each status, silence or broken connection becomes, and that the key is only ever in the header."""

import asyncio
import email.utils
import logging
import threading
import time

import httpx2
import pytest

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from topd.endpoint.faults import BadAnswer, Busy, Fault, Forbidden, Refused, Unavailable
from topd.endpoint.replica import MAX_RETRY_AFTER, MIN_RETRY_AFTER, Replica, Request, is_loopback, retry_after

KEY = "sk-4f1c0ffee"
MODELS = Request(path="/v1/models", method="GET")
NOWHERE = "http://127.0.0.1:9/v1"


@pytest.fixture(scope="module")
def proxy():
    with proxying(NOWHERE) as proxy:
        yield proxy


def send(url, request=MODELS, *, api_key=None, timeout_s=5.0, **options):
    async def once():
        replica = Replica(url, api_key=api_key, timeout_s=timeout_s)
        try:
            return await replica.send(request, **options)
        finally:
            await replica.close()

    return asyncio.run(once())


def fault_of(proxy, fault, **options):
    proxy.give(faults.always(fault), "models")
    with pytest.raises(Fault) as caught:
        send(proxy.url, **options)
    return caught.value


KINDS = {
    Refused: (307, 400, 404, 413, 422, 501),
    Forbidden: (401, 403),
    Busy: (429,),
    Unavailable: (408, 409, 425, 500, 502, 503, 504),
}


@pytest.mark.parametrize(("code", "kind"), [(code, kind) for kind, codes in KINDS.items() for code in codes])
def test_a_status_becomes_a_fault_that_says_who_answered_what(proxy, code, kind):
    fault = fault_of(proxy, faults.status(code, body='{"error": {"message": "too\\n   long"}}'))
    assert type(fault) is kind
    assert str(fault) == f"{proxy.url.removesuffix('/v1')} answered {code}: too long"


@pytest.mark.parametrize(
    ("code", "headers", "seconds"),
    [
        (429, {}, 1.0),
        (429, {"retry_after": "7"}, 7.0),
        (429, {"retry_after": "0.5"}, 0.5),
        (429, {"retry_after": "0"}, MIN_RETRY_AFTER),
        (429, {"retry_after": "-3"}, MIN_RETRY_AFTER),
        (429, {"retry_after": "86400"}, MAX_RETRY_AFTER),
        (429, {"retry_after": "inf"}, MAX_RETRY_AFTER),
        (429, {"retry_after": "nan"}, MIN_RETRY_AFTER),
        (429, {"retry_after": "soon"}, 1.0),
        (503, {"retry_after": "7"}, 7.0),
    ],
)
def test_a_server_that_asks_to_wait_is_busy_for_so_long(proxy, code, headers, seconds):
    fault = fault_of(proxy, faults.status(code, **headers))
    assert type(fault) is Busy
    assert fault.seconds == seconds


NO_TIMES = (
    "Mon, 32 Foo 2026 99:00:00 GMT",
    "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
    "Mon, 01 Jan 2024 99999999999999999999:00:00 GMT",
    "Mon, 01 Jan 2024 00:00:00 +999999999999999999",
    "Mon, 01 Jan 2024 00:00:00 +99999999",
    "Fri, 31 Dec 9999 23:59:59 -9999",
)


def test_a_time_to_wait_may_be_a_date():
    def seconds(value):
        return retry_after(httpx2.Response(429, headers={"retry-after": value}))

    assert seconds(email.utils.formatdate(time.time() + 30, usegmt=True)) == pytest.approx(30, abs=2)
    assert seconds(email.utils.formatdate(time.time() + 30)) == pytest.approx(30, abs=2)
    assert seconds(email.utils.formatdate(time.time() - 30, usegmt=True)) == 0
    for value in (*NO_TIMES, ""):
        assert seconds(value) is None
    assert retry_after(httpx2.Response(429)) is None


@pytest.mark.parametrize("body", ["<html>\n<h1>Bad</h1>", '{"detail": "Bad gateway"}', '["Bad gateway"]', "\xff\xfe", "["])
def test_whatever_the_server_says_is_shown_in_one_short_line(proxy, body):
    said = str(fault_of(proxy, faults.status(502, body=body + "x" * 5000)))
    assert len(said) < 400
    assert "\n" not in said


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("value", NO_TIMES)
def test_a_date_that_no_clock_can_show_is_a_fault_like_any_other(proxy, code, value):
    assert isinstance(fault_of(proxy, faults.status(code, retry_after=value)), Unavailable)


@pytest.mark.parametrize("charset", ["zlib", "hex", "rot13", "idna", "undefined", "utf-32", "utf-7", "no-such-codec"])
def test_a_charset_that_decodes_no_text_does_not_matter(proxy, charset):
    fault = fault_of(proxy, faults.status(502, body="Bad gateway +AGE-", content_type=f"text/html; charset={charset}"))
    assert str(fault).endswith("answered 502: Bad gateway +AGE-")


def test_a_redirect_to_nowhere_is_a_fault(proxy):
    """The HTTP library reads the address, though no redirect is followed, and fails in a way of its own."""
    fault = fault_of(proxy, faults.status(307, location="//:99999999"))
    assert type(fault) is BadAnswer
    assert "unreadable answer" in str(fault)


@pytest.mark.parametrize("body", ["%s", '{"error": "%s"}', '{"error": {"message": "%s"}}', '["%s"]'])
def test_no_servers_words_move_the_cursor_or_turn_the_text_round(proxy, body):
    words = "\x1b[2J\x1b]0;x\x07 \u202eno\u200b \x9b1m"
    said = str(fault_of(proxy, faults.status(502, body=body % words)))
    assert said.isprintable()
    assert "[2J" in said


@pytest.mark.parametrize("fault", [faults.reset_before_headers, faults.reset_after_headers, faults.cut_off])
def test_a_broken_connection_is_worth_another_try(fault):
    async def hello(exchange):
        return faults.Reply(200, b"hello, hello")

    with proxying(NOWHERE) as proxy:
        proxy.speak = hello
        assert type(fault_of(proxy, fault)) is Unavailable


def test_a_server_that_is_not_there_is_worth_another_try():
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9: .*connection"):
        send(NOWHERE)


def test_silence_ends_with_the_timeout(proxy):
    start = time.monotonic()
    assert "did not answer within 0.2 s" in str(fault_of(proxy, faults.stall, timeout_s=0.2))
    assert time.monotonic() - start < 2


def test_an_answer_that_never_ends_ends_with_the_timeout(proxy):
    async def drip(exchange):
        exchange.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while not exchange.writer.is_closing():
            exchange.writer.write(b"x")
            await exchange.writer.drain()
            await asyncio.sleep(0.02)

    assert type(fault_of(proxy, drip, timeout_s=0.2)) is Unavailable


def test_what_is_not_http_or_cannot_be_unpacked_is_a_fault(proxy):
    async def noise(exchange):
        exchange.writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await exchange.writer.drain()
        await asyncio.sleep(0.05)

    assert type(fault_of(proxy, noise)) is Unavailable
    packed = faults.status(200, body="no gzip", content_encoding="gzip")
    assert type(fault_of(proxy, packed)) is BadAnswer


def test_redirects_are_not_followed(proxy):
    """They could lead the key to another host."""
    with proxying(NOWHERE) as other:
        fault = fault_of(proxy, faults.status(307, location=f"{other.url}/models"), api_key=KEY)
        assert type(fault) is Refused
        assert other.requests == []


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_base_url_may_end_in_v1_or_not(url):
    assert Replica(url, api_key=None, timeout_s=1.0).url == "http://h:1"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000/v1", True),
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.9.9.9/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://10.0.0.1:8000/v1", False),
        ("https://example.org/v1", False),
        ("http://localhost.example.org/v1", False),
    ],
)
def test_loopback_is_recognised(url, expected):
    assert is_loopback(url) is expected


def test_no_proxy_comes_between_this_machine_and_itself(proxy, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    proxy.give(faults.always(faults.status(200)), "models")
    assert send(proxy.url).status_code == 200
    with pytest.raises(Unavailable):
        send("http://192.0.2.1/v1", timeout_s=2.0)  # by the proxy, where nobody listens


def test_the_key_is_in_the_header_and_nowhere_else(proxy, caplog):
    """Not in an exception, its context or cause, a log record of any library, or a repr, even if the server repeats it."""
    caplog.set_level(logging.DEBUG)
    replica = Replica(proxy.url, api_key=KEY, timeout_s=0.2)
    texts = [repr(replica), str(vars(replica)["_client"])]
    repeated = f'{{"error": {{"message": "Incorrect API key provided: {KEY}"}}}}'
    for fault in (
        faults.echo_headers,
        faults.status(401, body=repeated),
        faults.status(400, body=f"x{KEY}x"),
        faults.stall,
        faults.reset_before_headers,
    ):
        error = fault_of(proxy, fault, api_key=KEY, timeout_s=0.2)
        while error is not None:
            texts += [str(error), repr(error)]
            error = error.__cause__ or error.__context__
    assert {request.headers["authorization"] for request in proxy.requests[-5:]} == {f"Bearer {KEY}"}
    texts += [record.getMessage() for record in caplog.records]
    assert len(texts) > 10
    assert not any(KEY in text for text in texts)


def test_without_a_key_there_is_no_header(proxy):
    proxy.give(faults.always(faults.status(200)), "models")
    for key in (None, ""):
        send(proxy.url, api_key=key)
        assert "authorization" not in proxy.requests[-1].headers


def test_requests_do_not_wait_for_each_other():
    """As many connections as the pool allows requests."""

    async def together(url):
        replica = Replica(url, api_key=None, timeout_s=5.0)
        try:
            await asyncio.gather(*(replica.send(MODELS) for _ in range(40)))
        finally:
            await replica.close()

    with proxying(NOWHERE) as proxy:
        gate = threading.Semaphore(0)

        async def wait_for_all(exchange):
            gate.release()
            while gate._value < 40:
                await asyncio.sleep(0.01)
            return faults.Reply(200)

        proxy.give(faults.always(wait_for_all), "models")
        asyncio.run(together(proxy.url))
